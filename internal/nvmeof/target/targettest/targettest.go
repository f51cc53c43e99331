// Package targettest makes the part of a target that does not depend on the transport, for tests that serve it over
// one: drives, a subsystem with a namespace on each, and the target service.
package targettest

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor/kv"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/kvtest"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/telemetry"
)

// NQN is the subsystem that any host may use.
const NQN = "nqn.2026-11.example.jbofd:test"

// NamespaceBytes is the size of each namespace, BlockBytes that of its blocks.
const (
	NamespaceBytes = 64 << 20
	BlockBytes     = 4096
)

// QuiesceMS is how long the target waits for commands that a drive has.
const QuiesceMS = 3000

// Limits are those of commands.
var Limits = nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 64 << 10}

// Config says what differs from test to test.
type Config struct {
	// Devices are the drives, which Close closes; by default one in memory. Policies are those of the first drives.
	Devices  []ssd.Device
	Policies []pipeline.Policy
	// PoolBytes is the size of the pool of buffers.
	PoolBytes int64
	// InCapsuleBytes and MaxEntries are announced to hosts.
	InCapsuleBytes int
	MaxEntries     int
}

// Target is a target without a transport.
type Target struct {
	Pool      *bufpool.Pool
	Service   *target.Service
	Telemetry *telemetry.Telemetry
	// State was applied to Service last.
	State   nvmeof.State
	drives  []*drive.Drive
	devices []ssd.Device
}

// New makes a target that has no port yet; see Apply. The caller calls Close.
func New(t testing.TB, cfg Config) *Target {
	t.Helper()
	pool, err := bufpool.New(bufpool.Config{TotalBytes: cfg.PoolBytes})
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Devices == nil {
		dev, err := mem.Open(mem.Config{Name: "m0", SizeBytes: NamespaceBytes})
		if err != nil {
			t.Fatal(err)
		}
		cfg.Devices = []ssd.Device{dev}
	}
	tt := &Target{Pool: pool, devices: cfg.Devices,
		Telemetry: telemetry.New(telemetry.Options{Version: "test", Node: "test"})}
	var namespaces []*nvmeof.Namespace
	for i, dev := range cfg.Devices {
		c := drive.Config{Device: dev, Pool: pool}
		if i < len(cfg.Policies) {
			c.Policy = cfg.Policies[i]
		}
		d, err := drive.New(c)
		if err != nil {
			t.Fatal(err)
		}
		tt.drives = append(tt.drives, d)
		namespaces = append(namespaces, &nvmeof.Namespace{NSID: uint32(i + 1), SSD: i, SizeBytes: NamespaceBytes,
			BlockShift: 12, ANAGroup: 1, ANAState: nvme.ANAStateOptimized})
	}
	machine := nvmeof.New(nvmeof.Config{Firmware: "test", Limits: Limits, InCapsuleBytes: cfg.InCapsuleBytes,
		MaxEntries: cfg.MaxEntries, MaxIOQueues: 64, MaxControllers: 1024, MaxHosts: 1024, MaxDiscovery: 500,
		MaxDiscoveryPerPeer: 500, MaxDiscoveryKATOMS: 300_000, MinKATOMS: 1000, QuiesceMS: QuiesceMS,
		DiscoveryIdleMS: 120000})
	start := time.Now()
	tt.Service = target.New(target.Config{Target: machine, SSDs: tt.drives, Pool: pool,
		Log: slog.New(slog.DiscardHandler), Clock: func() int64 { return int64(time.Since(start)) },
		Events: target.Events{KeepAliveExpired: func(*nvmeof.Controller, time.Duration) {}}})
	tt.State.Subsystems = []nvmeof.SubsystemState{{NQN: NQN, Serial: "1", Model: "test", AllowAnyHost: true,
		Namespaces: namespaces}}
	return tt
}

// Apply applies State with a port.
func (tt *Target) Apply(port nvmeof.Port) {
	tt.State.Ports = []nvmeof.Port{port}
	tt.Service.Apply(tt.State)
}

// AddKV adds namespace nsid, of keys and values, which p serves, and applies State.
func (tt *Target) AddKV(nsid uint32, p kv.Partition) {
	sub := &tt.State.Subsystems[0]
	sub.Namespaces = append(sub.Namespaces, &nvmeof.Namespace{NSID: nsid, CSI: nvme.CSIKV, SizeBytes: NamespaceBytes,
		OffsetBytes: NamespaceBytes, Partition: tt.Service.AddPartition(p), MaxValueBytes: kvtest.MaxValue,
		ANAGroup: 1, ANAState: nvme.ANAStateOptimized, UsedBytes: func() int64 { return 12345 }})
	tt.Service.Apply(tt.State)
}

// Close ends the service and the drives, after the transport, and checks that all buffers have been given back.
func (tt *Target) Close(t testing.TB) {
	tt.Service.Close()
	for i, d := range tt.drives {
		if err := errors.Join(d.Close(), tt.devices[i].Close()); err != nil {
			t.Error(err)
		}
	}
	tt.Pool.CloseTest(t)
}
