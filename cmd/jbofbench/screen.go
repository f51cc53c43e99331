package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// screen is where progress goes: on a terminal one line that is overwritten, elsewhere a line every five
// seconds.
type screen struct {
	w io.Writer
	// columns returns the present width of the terminal; nil: w is not a terminal.
	columns func() int
	open    bool // a line without its end is on the terminal
	name    string
	last    time.Duration
}

func newScreen(w io.Writer) *screen {
	s := &screen{w: w}
	if f, ok := w.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			s.columns = func() int {
				z, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
				if err != nil || z.Col == 0 {
					return 80
				}
				return int(z.Col)
			}
		}
	}
	return s
}

// due reports whether the state of a phase is to be shown, elapsed after its beginning. The last one always is.
func (s *screen) due(phase string, elapsed time.Duration, last bool) bool {
	if phase != s.name {
		s.end()
		s.name, s.last = phase, 0
	}
	if s.columns == nil && !last && elapsed-s.last < 4900*time.Millisecond {
		return false
	}
	s.last = elapsed
	return true
}

// show writes a line, which the next one overwrites on a terminal; there it is cut, as one that takes two rows would
// not be overwritten.
func (s *screen) show(line string) {
	if s.columns == nil {
		fmt.Fprintln(s.w, line)
		return
	}
	if r, n := []rune(line), s.columns()-1; len(r) > n {
		line = string(r[:max(n, 0)])
	}
	fmt.Fprintf(s.w, "\r%s\x1b[K", line)
	s.open = true
}

// end finishes the line on the terminal.
func (s *screen) end() {
	if s.open {
		fmt.Fprintln(s.w)
		s.open = false
	}
}
