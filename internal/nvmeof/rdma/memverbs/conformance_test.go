package memverbs

import (
	"fmt"
	"testing"
	"time"

	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/rdma/verbstest"
)

func TestConformance(t *testing.T) {
	forSeeds(t, 10, func(t *testing.T, seed uint64) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			n := New(Config{Seed: seed, Live: true})
			target, host := n.NewProvider(DeviceConfig{Addr: targetIP}), n.NewProvider(DeviceConfig{Addr: hostIP})
			if seed%2 == 0 {
				host = target
			}
			verbstest.Run(t, verbstest.Config{Target: target, Host: host, Addr: targetIP, Invalidates: true,
				Timeout: 20 * time.Second})
			for _, p := range []verbs.Provider{target, host} {
				if err := p.Close(); err != nil {
					t.Error(err)
				}
			}
			n.Close()
			if err := n.Faults(); err != nil {
				t.Error(err)
			}
		})
	})
}
