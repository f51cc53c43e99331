package e2e

import (
	"encoding/json"
	"os"
	"strings"
	"syscall"
	"testing"
)

// TestALogInJSONHasNothingElse: the process writes nothing else: no hints, no plain text of libraries, and no final
// error message.
func TestALogInJSONHasNothingElse(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: memSSD, subsystems: openSubsystem, log: "level: debug, format: json"})
	c := d.connect(d.options(hostA, nqnA))
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(d.file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	var answer any
	if err := d.admin("POST", "/v1/reload", &answer); err == nil {
		t.Error("a reload without a configuration is accepted")
	}
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-d.exited
	lines := 0
	for line := range strings.Lines(d.log.String()) {
		lines++
		if !json.Valid([]byte(line)) {
			t.Errorf("not JSON: %s", line)
		}
	}
	if lines < 8 || !strings.Contains(d.log.String(), `"msg":"stopped"`) {
		t.Errorf("%d lines:\n%s", lines, d.log.String())
	}
}
