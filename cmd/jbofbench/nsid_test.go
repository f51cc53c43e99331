package main

import (
	"context"
	"io"
	"strings"
	"testing"

	"jbofd/internal/admin"
	"jbofd/internal/config"
	"jbofd/internal/daemon"
)

// TestAWrongNamespaceIsAnsweredWithTheRightOnes and with the command that is for it.
func TestAWrongNamespaceIsAnsweredWithTheRightOnes(t *testing.T) {
	cfg, err := config.Parse("test", []byte(`
listeners: [{address: "127.0.0.1:0"}]
admin: {socket: ""}
metrics: {address: ""}
discovery: {address: ""}
ssds: [{name: s, backend: mem, size: 256MiB}]
subsystems:
  - nqn: nqn.2026-11.example.jbofd:x
    allow_any_host: true
    namespaces: [{nsid: 2, ssd: s, size: 16MiB}, {nsid: 5, ssd: s, size: 64MiB, type: kv}]
`))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- daemon.Run(ctx, daemon.Options{Config: cfg, Stderr: io.Discard, Version: "test",
			Ready: func(a daemon.Addresses, _ []admin.Reason) { ready <- a.Listeners[0] }})
	}()
	var address string
	select {
	case address = <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	const kv = "kv -p recordcount=1 -p operationcount=1 --nsid "
	for line, want := range map[string]string{
		"block --nsid 9": "--nsid must be one of: 2 5",
		"block --nsid 5": "jbofbench kv --nsid 5 is for it",
		kv + "9":         "--nsid must be one of: 2 5",
		kv + "2":         "jbofbench block --nsid 2 is for it",
	} {
		args := append(strings.Fields(line), "--nqn", "nqn.2026-11.example.jbofd:x", "--target", "tcp://"+address)
		if status, _, errs := command(t, args...); status != 1 || !strings.Contains(errs, want) {
			t.Errorf("%s: exit status %d, no %q in %s", line, status, want, errs)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
