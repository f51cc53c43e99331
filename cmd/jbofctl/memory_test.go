package main

import (
	"testing"

	"jbofd/internal/admin"
)

func TestMemoryOfADriveIsDescribed(t *testing.T) {
	for want, m := range map[string]admin.Memory{
		"2MiB, persistent": {Kind: "pmr", SizeBytes: 2 << 20, Persistent: true},
		"2MiB, persistent, not restored after a loss of power": {SizeBytes: 2 << 20, Persistent: true,
			NotRestored: true},
		"16MiB, volatile, it is not ready": {Kind: "cmb", SizeBytes: 16 << 20, Error: "it is not ready"},
	} {
		if got := memory(m); got != want {
			t.Errorf("%+v is %q, want %q", m, got, want)
		}
	}
}
