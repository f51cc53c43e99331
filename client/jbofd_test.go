package client_test

import (
	"errors"
	"flag"
	"log/slog"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/bufpool"
	"jbofd/internal/drive"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/ssd/fault"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/telemetry"
	"jbofd/internal/testutil/loopback"
)

const (
	jbofdNQN   = "nqn.2026-11.example.jbofd:test"
	jbofdBytes = 16 << 20
	jbofdBlock = 4096
)

// jbofd is the project's own target in this process: one namespace over TCP, on a drive with fault injection.
type jbofd struct {
	address string
	drive   *fault.Device
}

func newJBOFD(t testing.TB) *jbofd {
	t.Helper()
	seed := flag.Lookup("seed").Value.(flag.Getter).Get().(uint64)
	t.Logf("-seed %d", seed)
	ram, err := mem.Open(mem.Config{Name: "m0", SizeBytes: jbofdBytes})
	if err != nil {
		t.Fatal(err)
	}
	dev, err := fault.New(ram, fault.Config{Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	pool, err := bufpool.New(bufpool.Config{TotalBytes: 32 << 20})
	if err != nil {
		t.Fatal(err)
	}
	drv, err := drive.New(drive.Config{Device: dev, Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	limits := nvmeof.Limits{MDTSBytes: 1 << 20, FusedBytes: 64 << 10}
	machine := nvmeof.New(nvmeof.Config{Firmware: "test", Limits: limits, InCapsuleBytes: 8192, MaxEntries: 129,
		MaxIOQueues:    64,
		MaxControllers: 1024, MaxHosts: 1024, MinKATOMS: 100, DiscoveryIdleMS: 120000})
	start := time.Now()
	service := target.New(target.Config{Target: machine, SSDs: []*drive.Drive{drv}, Pool: pool,
		Log:    slog.New(slog.DiscardHandler),
		Clock:  func() int64 { return int64(time.Since(start)) },
		Events: target.Events{KeepAliveExpired: func(*nvmeof.Controller, time.Duration) {}}})
	tel := telemetry.New(telemetry.Options{Version: "test", Node: "test"})
	srv, err := serve.New(serve.Config{
		Machine: tcp.Config{InCapsuleBytes: 8192, MaxH2CDataBytes: 1 << 20, Limits: limits},
		Admission: connection.NewAdmission(connection.AdmissionLimits{Connections: 1024, PerHost: 512, Pending: 256,
			PendingPerAddress: 256}, tel), MaxSockets: 2048,
		ReceiveBytes: 128 << 10, BacklogBytes: 1 << 20,
		HandshakeTimeout: 10 * time.Second, StallTimeout: 10 * time.Second, SpinFor: 50 * time.Microsecond,
	}, service, tel, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l := loopback.Listen(t)
	port := serve.PortFor(1, l, false)
	service.Apply(nvmeof.State{Ports: []nvmeof.Port{port}, Subsystems: []nvmeof.SubsystemState{{NQN: jbofdNQN,
		Serial: "1", Model: "test",
		AllowAnyHost: true, Namespaces: []*nvmeof.Namespace{{NSID: 1, SizeBytes: jbofdBytes, BlockShift: 12,
			ANAGroup: 1,
			ANAState: nvme.ANAStateOptimized}}}}})
	srv.Serve(l, port)
	t.Cleanup(func() {
		dev.SetRules() // nothing delays the end of the test
		srv.Close()
		service.Close()
		if err := errors.Join(drv.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
		pool.CloseTest(t)
	})
	return &jbofd{address: l.Addr().String(), drive: dev}
}

func (j *jbofd) connect(t testing.TB, o client.Options) *client.Controller {
	t.Helper()
	if o.Address == "" {
		o.Address = j.address
	}
	o.SubNQN = jbofdNQN
	c, err := client.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}
