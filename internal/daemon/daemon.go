// Package daemon builds a node from a configuration and runs it: drives, target,
// listeners, metrics, admin socket; reload and orderly stop.
package daemon

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"

	"jbofd/internal/bufpool"
	"jbofd/internal/config"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/nvmeof/fabric/queue"
	"jbofd/internal/nvmeof/qpair"
	rdmaserve "jbofd/internal/nvmeof/rdma/serve"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/ssd/label"
	"jbofd/internal/telemetry"
)

// Options are what Run needs beside the configuration.
type Options struct {
	Config *config.Config
	// Load reads the configuration anew, on SIGHUP or when the admin API asks.
	Load func() (*config.Config, error)
	// Reload delivers a value for each SIGHUP; nil: none.
	Reload <-chan os.Signal
	// Stderr is where log lines go.
	Stderr io.Writer
	// Version and Commit identify the build.
	Version, Commit string
	// RDMA reaches the machine's RDMA devices; nil: verbs.Open, if the configuration has RDMA listeners.
	RDMA verbs.Provider
	// Ready, if set, is called once hosts can connect.
	Ready func(Addresses)
}

// Addresses are where a node listens.
type Addresses struct {
	// Metrics is empty if there is no server; so is Discovery.
	Metrics, Discovery string
	// Listeners are IP:port, of RDMA with rdma:// before it.
	Listeners []string
}

// spinFor is how long a queue's reader asks for the next command before it
// sleeps. Parking and waking a goroutine costs two or three times as much.
const spinFor = 50 * time.Microsecond

// fusedBytes is the largest fused Compare and Write (ACWU).
const fusedBytes = 64 << 10

// Node is a running jbofd.
type Node struct {
	opts Options
	// reload is held while a configuration takes effect or a namespace is deleted.
	// cfg changes only then, under cfgMu too: who only looks need not wait that long.
	reload sync.Mutex
	cfgMu  sync.Mutex
	cfg    *config.Config
	// stopping is closed, by beginStop, when the node is to stop.
	stopping  chan struct{}
	beginStop func()
	level     *slog.LevelVar
	log       *slog.Logger
	tel       *telemetry.Telemetry
	pool      *bufpool.Pool
	ssds      []*drive // in the configuration's order
	areas     swapAreas
	stores    stores
	fab       *fabric.Fabric
	tcp       *serve.Server
	rdma      *rdmaserve.Server // nil without RDMA listeners
	listeners []listener
	ports     []nvmeof.Port
	addrs     Addresses
	// closers are run in reverse order.
	closers []func()
}

// Run runs a node until ctx ends, then stops it in order.
//
// Errors: what keeps it from starting.
func Run(ctx context.Context, opts Options) error {
	n, err := start(opts)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, n.beginStop)()
	n.tel.Health().Clear("daemon")
	if opts.Ready != nil {
		opts.Ready(n.addrs)
	}
	notify(sd.SdNotifyReady)
	stopWatchdog := watchdog()
	for running := true; running; {
		select {
		case <-opts.Reload:
			notify(sd.SdNotifyReloading)
			if err := n.Reload(); err != nil {
				n.log.Error("reload refused; the old configuration stays in force", "error", err)
			}
			notify(sd.SdNotifyReady)
		case <-ctx.Done():
			running = false
		}
	}
	notify(sd.SdNotifyStopping)
	stopWatchdog()
	n.stop()
	return nil
}

// notify tells systemd, if it started us.
func notify(state string) { _, _ = sd.SdNotify(false, state) }

// watchdog tells systemd that we live, twice per period that it asked for.
func watchdog() (stop func()) {
	period, err := sd.SdWatchdogEnabled(false)
	if err != nil || period == 0 {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		t := time.NewTicker(period / 2)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				notify(sd.SdNotifyWatchdog)
			case <-done:
				return
			}
		}
	}()
	return func() { close(done) }
}

// start brings everything up; on error it takes down what it had.
func start(opts Options) (_ *Node, err error) {
	cfg := opts.Config
	n := &Node{opts: opts, cfg: cfg, level: new(slog.LevelVar), stopping: make(chan struct{}), stores: stores{open: map[label.UUID]*store{}, left: map[label.UUID]leftOut{}}}
	n.beginStop = sync.OnceFunc(func() { close(n.stopping) })
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	n.setLevel(cfg.Log.Level)
	n.log = slog.New(handler(opts.Stderr, cfg.Log.Format, n.level)).With("node", cfg.Node.Name)
	n.tel = telemetry.New(telemetry.Options{Version: opts.Version, Commit: opts.Commit, Node: cfg.Node.Name, MaxTenants: cfg.Metrics.MaxTenants})
	if cfg.Metrics.Address != "" {
		srv, err := n.tel.Serve(telemetry.ServerOptions{Address: cfg.Metrics.Address, Pprof: cfg.Metrics.Pprof})
		if err != nil {
			return nil, err
		}
		n.addrs.Metrics = srv.Addr().String()
		n.closing(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_ = srv.Close(ctx)
		})
	}
	maxBuffer := max(int(cfg.Limits.MDTS), 1<<20)
	n.pool, err = bufpool.New(bufpool.Config{TotalBytes: int64(cfg.Limits.Buffers), MaxBytes: maxBuffer})
	if err != nil {
		return nil, err
	}
	n.closing(func() {
		if err := n.pool.Close(); err != nil {
			n.log.Error("buffers leaked", "error", err)
		}
	})
	n.tel.SetBuffers(func() telemetry.BufferStats {
		s := n.pool.Stats()
		return telemetry.BufferStats{TotalBytes: s.TotalBytes, InUseBytes: s.InUseBytes, TakenBytes: s.TakenBytes, Waits: s.Waits}
	})
	if err := n.openSSDs(); err != nil {
		return nil, err
	}
	n.closing(n.closeAreas)
	if err := n.openAreas(); err != nil {
		return nil, err
	}
	n.closing(func() { n.closeStores(closeStoresTimeout) })
	if err := n.startTarget(); err != nil {
		return nil, err
	}
	n.tel.SetScheduling(n.scheduling)
	n.tel.SetKV(n.kvStats, n.swapStats)
	if err := n.listen(); err != nil {
		return nil, err
	}
	if err := n.apply(cfg, true); err != nil {
		return nil, err
	}
	if err := n.serveAdmin(); err != nil {
		return nil, err
	}
	n.serve()
	n.reload.Lock()
	n.freeAreas()
	n.reload.Unlock()
	return n, nil
}

func (n *Node) closing(f func()) { n.closers = append(n.closers, f) }

func (n *Node) close() { n.closeFrom(0) }

// closeFrom runs the closers from the k-th on, the last one first.
func (n *Node) closeFrom(k int) {
	for i := len(n.closers) - 1; i >= k; i-- {
		n.closers[i]()
	}
	n.closers = n.closers[:k]
}

// handler writes log records as the configuration says.
func handler(w io.Writer, format string, level *slog.LevelVar) slog.Handler {
	o := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.NewJSONHandler(w, o)
	}
	return slog.NewTextHandler(w, o)
}

func (n *Node) setLevel(name string) {
	var l slog.Level
	if l.UnmarshalText([]byte(name)) == nil {
		n.level.Set(l)
	}
}

// startTarget makes the target and the server, without listeners yet.
func (n *Node) startTarget() error {
	cfg := n.cfg
	began := time.Now()
	limits := nvmeof.Limits{MDTSBytes: uint32(cfg.Limits.MDTS), FusedBytes: min(fusedBytes, uint32(cfg.Limits.MDTS))}
	target := nvmeof.New(nvmeof.Config{
		Firmware:        firmware(n.opts.Version),
		NodeUUID:        nvme.UUID(digest("node", cfg.Node.Name)),
		Limits:          limits,
		InCapsuleBytes:  int(cfg.Limits.InCapsuleBytes),
		MaxEntries:      min(cfg.Limits.QueueDepth+1, qpair.MaxEntries), // a queue of n entries holds n-1 commands
		MaxIOQueues:     cfg.Limits.IOQueues,
		MaxControllers:  cfg.Limits.Controllers,
		MaxHosts:        cfg.Limits.Hosts,
		MinKATOMS:       uint32(cfg.Limits.KATOMin.Milliseconds()),
		DiscoveryIdleMS: uint32(cfg.Limits.DiscoveryIdleTimeout.Milliseconds()),
		WallMS:          began.UnixMilli(),
	})
	peers := slog.New(telemetry.LimitHandler(n.log.Handler(), telemetry.LimitOptions{PerSec: cfg.Log.PeerLinesPerSec, Dropped: n.tel.LogDropped}))
	n.fab = fabric.New(fabric.Config{
		Target: target, SSDs: n.owners(), Pool: n.pool, Log: peers,
		Clock: func() int64 { return int64(time.Since(began)) },
		Events: fabric.Events{KeepAliveExpired: func(c *nvmeof.Controller, idle time.Duration) {
			n.tel.KeepAliveTimeout()
			peers.Warn("keep alive timeout: association closed", "host", c.HostNQN, "subsystem", c.SubNQN, "cntlid", c.ID,
				"idle", idle.Round(time.Millisecond).String(), "kato", (time.Duration(c.KATOMS()) * time.Millisecond).String(), "last_command", c.LastCommand())
		}},
	})
	n.closing(n.fab.Close)
	admission := queue.NewAdmission(cfg.Limits.Connections, cfg.Limits.ConnectionsPerHost, n.tel)
	var err error
	n.tcp, err = serve.New(serve.Config{
		Machine:          tcp.Config{InCapsuleBytes: int(cfg.Limits.InCapsuleBytes), MaxH2CDataBytes: uint32(cfg.Limits.MDTS), Limits: limits},
		Admission:        admission,
		MaxConnections:   cfg.Limits.Connections,
		ReceiveBytes:     int(cfg.Limits.ReceiveBuffer),
		BacklogBytes:     int(cfg.Limits.MDTS),
		HandshakeTimeout: cfg.Limits.HandshakeTimeout,
		StallTimeout:     cfg.Limits.StallTimeout,
		SpinFor:          spinFor,
	}, n.fab, n.tel, peers)
	if err != nil {
		return err
	}
	n.closing(n.tcp.Close)
	return n.startRDMA(limits, admission, peers)
}

// firmware is the revision that hosts see, 8 bytes.
func firmware(version string) string {
	if len(version) > 8 {
		version = version[:8]
	}
	return version
}

// digest makes 16 stable bytes of some text.
func digest(parts ...string) (b [16]byte) {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	copy(b[:], h.Sum(nil))
	b[6], b[8] = b[6]&0x0f|0x80, b[8]&0x3f|0x80 // a custom (version 8) UUID
	return b
}

// Reload reads the configuration anew and changes what can change live.
//
// Errors: what is wrong with it, or needs a restart; then nothing has changed.
func (n *Node) Reload() error {
	n.reload.Lock()
	defer n.reload.Unlock()
	cfg, err := n.opts.Load()
	if err == nil {
		var ch config.Changes
		if ch, err = config.Diff(n.cfg, cfg); err == nil {
			if err = n.apply(cfg, false); err == nil {
				n.setLevel(cfg.Log.Level)
				n.cfgMu.Lock()
				n.cfg = cfg
				n.cfgMu.Unlock()
				n.freeAreas()
				n.log.Info("configuration reloaded", "changes", ch.String())
			}
		}
	}
	n.tel.Reloaded(err == nil)
	return err
}

// stop drains and closes.
func (n *Node) stop() {
	n.log.Info("stopping: no more connections, commands under way are finished", "drain_timeout", n.cfg.Limits.DrainTimeout.String())
	n.tel.Health().Block("daemon", "draining")
	ctx, cancel := context.WithTimeout(context.Background(), n.cfg.Limits.DrainTimeout)
	defer cancel()
	var drained sync.WaitGroup
	if n.rdma != nil {
		drained.Go(func() { n.rdma.Drain(ctx) })
	}
	n.tcp.Drain(ctx)
	drained.Wait()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		n.log.Warn("commands are still under way after drain_timeout; closing their connections")
	}
	// What is in swap areas may come home as long as commands could have taken.
	homeComing := time.Duration(0)
	if end, ok := ctx.Deadline(); ok && n.swappedKeys() > 0 {
		homeComing = max(time.Until(end), 0)
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		n.tcp.Close()
		if n.rdma != nil {
			n.rdma.Close()
		}
		n.closeStores(homeComing + closeStoresTimeout)
		n.flushDrives()
		n.close()
	}()
	select {
	case <-closed:
		n.log.Info("stopped")
	case <-time.After(homeComing + closeTimeout):
		// A drive that does not answer keeps its queue from closing. The process ends all
		// the same: what was acknowledged is as durable as it was said to be.
		n.log.Error("a drive still has not answered; stopped without closing it")
	}
}

// closeTimeout is how long closing may take after draining. Together with the
// default of limits.drain_timeout it is less than 5 s.
const closeTimeout = 900 * time.Millisecond
