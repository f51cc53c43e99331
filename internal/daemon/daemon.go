// Package daemon builds a node from a configuration and runs it: drives, target,
// listeners, metrics, admin socket; reload and orderly stop.
package daemon

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"

	"jbofd/internal/admin"
	"jbofd/internal/bufpool"
	"jbofd/internal/config"
	"jbofd/internal/drive"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
	rdmaserve "jbofd/internal/nvmeof/rdma/serve"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/nvmeof/tcp"
	"jbofd/internal/nvmeof/tcp/serve"
	"jbofd/internal/publish"
	"jbofd/internal/telemetry"
	"jbofd/internal/turn"
	"jbofd/internal/uuid"
)

// Options are the arguments of Run.
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
	// ConfigFile is where the configuration comes from, for the log.
	ConfigFile string
	// CloseTimeout is how long closing may take once the outstanding commands have ended; 0: closeTimeout. When it has
	// passed, Run returns although a drive is still open: the process must end, for nothing else closes that drive.
	CloseTimeout time.Duration
	// OpenTimeout is how long a drive may take to open after the start; 0: openTimeout. LookForDrivesEvery is how often
	// drives are looked for that are not in service; 0: lookForDrivesEvery.
	OpenTimeout, LookForDrivesEvery time.Duration
	// RDMA reaches the machine's RDMA devices; nil: verbs.Open, if the configuration has RDMA listeners.
	RDMA verbs.Provider
	// EtcdBinary is the jbofd that runs the server of etcd of a cluster; empty: this program.
	EtcdBinary string
	// Ready, if set, is called once hosts can connect, with the reasons why the node is nevertheless not ready: a drive
	// that is missing, for instance.
	Ready func(Addresses, []admin.Reason)
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
	// changes is held by a change from its beginning to its end, reload while the state of the node changes: see
	// change.go. cfg changes with both reload and cfgMu held; readers hold one of the two. cfgMu is never held for
	// long.
	changes, reload sync.Mutex
	// change is what holds changes, driveChange what holds reload without it. working is the drive of meanwhile; it
	// changes with reload held.
	change, driveChange change
	working             *drive.Drive
	cfgMu               sync.Mutex
	cfg                 *config.Config
	// resizedAhead are the namespaces that refused reloads have begun to resize; cfgMu guards it: see owed.
	resizedAhead []uuid.UUID
	// resizePatience is that of partition.ResizeOptions; tests change it.
	resizePatience time.Duration
	// stopping is closed, by beginStop, when the node is to stop.
	stopping  chan struct{}
	beginStop func()
	level     *slog.LevelVar
	log       *slog.Logger
	tel       *telemetry.Telemetry
	damage    *turnLog // of key-value stores
	pool      *bufpool.Pool
	// ssds are the drives, in the order of the configuration. The slice changes as a whole, with reload held.
	ssds      atomic.Pointer[[]*openSSD]
	hot       hotAdd
	areas     swapAreas
	left      leftOuts
	service   *target.Service
	publisher *publish.Publisher
	tcp       *serve.Server
	rdma      *rdmaserve.Server // nil without RDMA listeners
	cluster   *clusterMember    // nil without a cluster
	listeners []listener
	ports     []nvmeof.Port
	addrs     Addresses
	provider  verbs.Provider // of RDMA devices; nil without RDMA listeners
	// started reports that everything that requests to the admin API use exists.
	started atomic.Bool
	// endAdmin ends the admin API; it does nothing if there is none. Idempotent.
	endAdmin func()
	// endMetrics ends the HTTP server for metrics and probes; it does nothing if there is none. Idempotent.
	endMetrics func()
	// closers are run in reverse order.
	closers []func()
}

// Run runs a node until ctx ends, then stops it in order.
//
// Errors: why the node could not start. A drive that does not close in time at the stop is logged only.
func Run(ctx context.Context, opts Options) error {
	n, err := startUntil(ctx, opts)
	if n == nil {
		return err
	}
	defer context.AfterFunc(ctx, n.beginStop)()
	n.tel.Health().Clear("daemon")
	reasons := n.reasons()
	if len(reasons) == 0 {
		n.log.Info("ready")
	}
	for _, r := range reasons {
		n.log.Warn("hosts can connect, but the node is not ready", "component", r.Component, "reason", r.Reason)
	}
	if opts.Ready != nil {
		opts.Ready(n.addrs, reasons)
	}
	notify(sd.SdNotifyReady)
	defer watchdog()()
	go n.reloadOnSignal(ctx)
	<-ctx.Done()
	notify(sd.SdNotifyStopping)
	n.stop()
	return nil
}

// startUntil is start, but when ctx ends it waits for no longer than closing may take: a drive may be slow, or a store
// large. No host has been served yet, so the process may end as if it were killed. It returns nil and nil then.
func startUntil(ctx context.Context, opts Options) (*Node, error) {
	type outcome struct {
		n   *Node
		err error
	}
	started, gone := make(chan outcome), make(chan struct{})
	go func() {
		n, err := start(opts)
		select {
		case started <- outcome{n, err}:
		case <-gone:
			if n != nil {
				n.close()
			}
		}
	}()
	select {
	case o := <-started:
		return o.n, o.err
	case <-ctx.Done():
	}
	select {
	case o := <-started:
		return o.n, o.err
	case <-time.After(cmp.Or(opts.CloseTimeout, closeTimeout)):
		close(gone)
		notify(sd.SdNotifyStopping)
		NewLog(opts.Stderr, opts.Config.Log.Format, slog.LevelInfo).Warn("stopped before the start had ended", "node",
			opts.Config.Node.Name)
		return nil, nil
	}
}

// reloadOnSignal reloads the configuration for each SIGHUP until ctx ends. It has a goroutine of its own, so that a
// stop begins at once also during a reload; stop waits for the reload.
func (n *Node) reloadOnSignal(ctx context.Context) {
	for {
		select {
		case <-n.opts.Reload:
			notify(sd.SdNotifyReloading)
			_, _ = n.Reload("SIGHUP", false) // it has logged the error
			if ctx.Err() == nil {
				notify(sd.SdNotifyReady)
			}
		case <-ctx.Done():
			return
		}
	}
}

// start builds a node and lets hosts connect. On error it closes whatever it has opened.
func start(opts Options) (_ *Node, err error) {
	cfg := opts.Config
	n := &Node{opts: opts, cfg: cfg, level: new(slog.LevelVar), stopping: make(chan struct{}), endAdmin: func() {},
		endMetrics: func() {},
		left:       leftOuts{stores: map[uuid.UUID]leftOut{}}}
	n.beginStop = sync.OnceFunc(func() { close(n.stopping) })
	defer func() {
		if err != nil {
			n.close()
		}
	}()
	n.setLevel(cfg.Log.Level)
	n.log = NewLog(opts.Stderr, cfg.Log.Format, n.level).With("node", cfg.Node.Name)
	n.logStart()
	n.tel = telemetry.New(telemetry.Options{Version: opts.Version, Commit: opts.Commit, Node: cfg.Node.Name,
		MaxTenants: cfg.Metrics.MaxTenants})
	// Addresses and the admin socket are bound before a drive is opened: a second daemon, or one with a wrong address,
	// must fail before it labels a drive. Of a second daemon with one configuration, that it is one is said first.
	if err := n.checkAdmin(); err != nil {
		return nil, err
	}
	if err := n.bindMetrics(); err != nil {
		return nil, err
	}
	if err := n.listen(); err != nil {
		return nil, err
	}
	if err := n.bindAdmin(); err != nil {
		return nil, err
	}
	maxBuffer := max(int(cfg.Limits.MDTS), 1<<20)
	n.pool, err = bufpool.New(bufpool.Config{TotalBytes: int64(cfg.Limits.Buffers), MaxBytes: maxBuffer})
	if err != nil {
		return nil, err
	}
	n.closing(func() {
		if n.hot.hangs() {
			return // what is being opened may still use it
		}
		if err := n.pool.Close(); err != nil {
			n.log.Error("data buffers are still in use at stop", "error", err)
		}
	})
	n.tel.SetBuffers(func() telemetry.BufferStats {
		s := n.pool.Stats()
		return telemetry.BufferStats{TotalBytes: s.TotalBytes, InUseBytes: s.InUseBytes, TakenBytes: s.TakenBytes,
			ArenaBytes: s.ArenaBytes, Waits: s.Waits}
	})
	n.damage = newTurnLog(n.log, 10, n.tel.LogDropped)
	n.closing(n.damage.close)
	n.closing(n.awaitOpenings)
	if err := n.openDrives(); err != nil {
		return nil, err
	}
	for range n.drives() {
		n.hot.now = append(n.hot.now, make(chan struct{}, 1))
	}
	n.watchDrives()
	n.closing(n.closeAreas)
	if err := n.openAreas(); err != nil {
		return nil, err
	}
	n.closing(func() {
		if n.publisher != nil {
			n.publisher.CloseAll(closeStoresTimeout)
		}
	})
	if err := n.startTarget(); err != nil {
		return nil, err
	}
	if err := n.startCluster(); err != nil {
		return nil, err
	}
	n.tel.SetScheduling(n.scheduling)
	n.tel.SetKV(n.kvStats, n.swapStats)
	if err := n.apply(cfg, lenient); err != nil {
		return nil, err
	}
	n.serve()
	n.started.Store(true)
	n.closing(n.endAdmin) // before everything that its requests use
	n.attendDrives()
	n.changes.Lock()
	n.reload.Lock()
	n.change.set("the freeing of swap areas that are not configured any more")
	n.freeAreas()
	if n.cluster != nil {
		n.cluster.joining.Go(n.cluster.join) // it waits for changes
	}
	if all := n.resizes(cfg); len(all) > 0 {
		n.change.set(all[0].what() + " (start)")
		go n.resizeLate(cfg)
		return n, nil
	}
	n.endChange()
	return n, nil
}

func (n *Node) closing(f func()) { n.closers = append(n.closers, f) }

// close runs the closers, the last one first.
func (n *Node) close() {
	for i := len(n.closers) - 1; i >= 0; i-- {
		n.closers[i]()
	}
	n.closers = nil
}

// bindMetrics starts the HTTP server for metrics and probes, which say that the node is starting.
func (n *Node) bindMetrics() error {
	m := n.cfg.Metrics
	if m.Address == "" {
		return nil
	}
	srv, err := n.tel.Serve(telemetry.ServerOptions{Address: m.Address, Pprof: m.Pprof, Log: n.log})
	if err != nil {
		return err
	}
	n.addrs.Metrics = srv.Addr().String()
	n.endMetrics = sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = srv.Close(ctx)
	})
	n.closing(n.endMetrics)
	return nil
}

// startTarget makes the target and its TCP and RDMA servers, which do not listen yet.
func (n *Node) startTarget() error {
	cfg := n.cfg
	limits := nvmeof.Limits{MDTSBytes: uint32(cfg.Limits.MDTS), FusedBytes: min(fusedBytes, uint32(cfg.Limits.MDTS))}
	machine := nvmeof.New(nvmeof.Config{
		Firmware:       firmware(n.opts.Version),
		NodeUUID:       uuid.UUID(digest("node", cfg.Node.Name)),
		Limits:         limits,
		InCapsuleBytes: int(cfg.Limits.InCapsuleBytes),
		MaxEntries:     min(cfg.Limits.QueueDepth+1, qpair.MaxEntries), // a queue of n entries holds n-1 commands
		MaxIOQueues:    cfg.Limits.IOQueues,
		MaxControllers: cfg.Limits.Controllers,
		MaxHosts:       cfg.Limits.Hosts,
		MinKATOMS:      uint32(cfg.Limits.KATOMin.Milliseconds()),
		QuiesceMS:      uint32(cfg.Limits.QuiesceTimeout.Milliseconds()),

		MaxDiscovery: cfg.Limits.DiscoveryControllers, MaxDiscoveryPerPeer: cfg.Limits.DiscoveryPerAddress,
		MaxDiscoveryKATOMS: uint32(cfg.Limits.DiscoveryKATOMax.Milliseconds()),

		DiscoveryIdleMS: uint32(cfg.Limits.DiscoveryIdleTimeout.Milliseconds()),
		WallMS:          time.Now().UnixMilli() - turn.Real.Now()/1e6,
	})
	peers := n.peerLog()
	n.service = target.New(target.Config{
		Target: machine, SSDs: n.owners(), Pool: n.pool, Log: peers,
		Events: target.Events{KeepAliveExpired: func(c *nvmeof.Controller, idle time.Duration) {
			n.tel.KeepAliveTimeout()
			peers.Warn("keep alive timeout: association closed", "host", c.HostNQN, "subsystem", c.SubNQN, "cntlid",
				c.ID,
				"idle", idle.Round(time.Millisecond).String(), "kato",
				(time.Duration(c.KATOMS()) * time.Millisecond).String(), "last_command", c.LastCommand())
		}, Overdue: func(c *nvmeof.Controller, what string, inFlight int) {
			peers.Error("commands that a drive has do not end", "what", what, "host", c.HostNQN, "subsystem", c.SubNQN,
				"cntlid", c.ID, "in_flight", inFlight, "quiesce_timeout", cfg.Limits.QuiesceTimeout.String())
		}},
	})
	n.closing(n.service.Close)
	n.publisher = publish.New(publish.Config{Service: n.service, Closed: n.storeClosed, MDTSBytes: limits.MDTSBytes,
		Stopping: n.stopping})
	admission := connection.NewAdmission(connection.AdmissionLimits{Connections: cfg.Limits.Connections,
		PerHost: cfg.Limits.ConnectionsPerHost,
		Pending: cfg.Limits.PendingConnections, PendingPerAddress: cfg.Limits.PendingPerAddress}, n.tel)
	var err error
	n.tcp, err = serve.New(serve.Config{
		Machine: tcp.Config{InCapsuleBytes: int(cfg.Limits.InCapsuleBytes), MaxH2CDataBytes: uint32(cfg.Limits.MDTS),
			Limits: limits},
		Admission: admission,
		// Twice the pending connections, since those that were evicted take a moment to close.
		MaxSockets:       cfg.Limits.Connections + 2*(cfg.Limits.PendingConnections+cfg.Limits.DiscoveryControllers),
		ReceiveBytes:     int(cfg.Limits.ReceiveBuffer),
		BacklogBytes:     int(cfg.Limits.MDTS),
		HandshakeTimeout: cfg.Limits.HandshakeTimeout,
		StallTimeout:     cfg.Limits.StallTimeout,
		MinBytesPerSec:   int64(cfg.Limits.MinTransferRate),
		SpinFor:          spinFor,
	}, n.service, n.tel, peers)
	if err != nil {
		return err
	}
	n.closing(n.tcp.Close)
	n.startRDMA(limits, admission, peers)
	return nil
}

// firmware is the revision that hosts see, 8 bytes.
func firmware(version string) string {
	if len(version) > 8 {
		version = version[:8]
	}
	return version
}

// digest derives a version 8 UUID from texts; the same texts give the same UUID.
func digest(parts ...string) (b [16]byte) {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	copy(b[:], h.Sum(nil))
	b[6], b[8] = b[6]&0x0f|0x80, b[8]&0x3f|0x80 // a custom (version 8) UUID
	return b
}

// awaitChange returns a channel that is closed when no reload, deletion of a namespace, discarding of a swap area, or
// change of a drive is under way any more. None begins after beginStop.
func (n *Node) awaitChange() <-chan struct{} {
	none := make(chan struct{})
	go func() {
		n.changes.Lock()
		defer n.changes.Unlock()
		n.reload.Lock()
		defer n.reload.Unlock()
		close(none)
	}()
	return none
}
