package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// masters are the other ends of the terminals that typing has returned.
var masters = map[*os.File]*os.File{}

// typing returns a terminal on which somebody has typed a line.
func typing(t *testing.T, line string) *os.File {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("this machine lends no terminals: %v", err)
	}
	t.Cleanup(func() { _ = master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Skipf("this machine lends no terminals: %v", err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Skipf("this machine lends no terminals: %v", err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("this machine lends no terminals: %v", err)
	}
	t.Cleanup(func() { _ = slave.Close() })
	if err := unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
		t.Fatal(err)
	}
	masters[slave] = master
	if _, err := master.WriteString(line + "\n"); err != nil {
		t.Fatal(err)
	}
	return slave
}

func TestOnATerminalTheNameMustBeTyped(t *testing.T) {
	for _, c := range []struct {
		typed, flags string
		want         int
	}{
		{"disk.img", "", 0},
		{"disk.img", "--force", 0},
		{"yes", "", 1},
		{"", "--force", 1},
		{"", "--force --yes", 0},
		{"disk.img", "--yes", 0}, // --yes alone is not enough for a drive that is not blank, so jbofctl asks
		{"no", "--yes", 1},
	} {
		p := drive(t, 0, "XFSB")
		var out, errs bytes.Buffer
		args := append([]string{"ssd", "format", p}, strings.Fields(c.flags)...)
		code := execute(t.Context(), args, terminal{in: typing(t, c.typed), out: &out, err: &errs})
		if code != c.want {
			t.Errorf("%q typed, flags %q: exit status %d, want %d\n%s", c.typed, c.flags, code, c.want, &errs)
		}
		if !strings.Contains(c.flags, "--yes") && !strings.Contains(errs.String(), "an XFS file system") {
			t.Errorf("%q: does not say what it sees: %s", c.typed, &errs)
		}
		if formatted := labelOf(t, p) != ""; formatted != (c.want == 0) {
			t.Errorf("%q typed, flags %q: formatted is %v", c.typed, c.flags, formatted)
		}
	}
}
