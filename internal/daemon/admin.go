package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"sync"
	"syscall"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/config"
	"jbofd/internal/ssd/label"
	"jbofd/internal/uuid"
)

// checkAdmin refuses to start if another daemon has the admin socket.
func (n *Node) checkAdmin() error {
	if path := n.cfg.Admin.Socket; path != "" {
		if err := removeStale(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return n.cfg.FieldProblem("admin.socket", err)
		}
	}
	return nil
}

// bindAdmin opens the admin socket and serves it. Until the node has started, only status requests are answered. The
// socket's directory is created if it is missing, since /run is empty after a boot; its parents are not, since a path
// that lacks them is probably misspelled.
func (n *Node) bindAdmin() error {
	path := n.cfg.Admin.Socket
	if path == "" {
		return nil
	}
	problem := func(err error) error { return n.cfg.FieldProblem("admin.socket", err) }
	if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return problem(err)
	}
	if err := removeStale(path); err != nil {
		return problem(err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return problem(err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return errors.Join(problem(err), l.Close())
	}
	mux := n.adminAPI()
	srv := &http.Server{ReadTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, MaxHeaderBytes: 8 << 10,
		ErrorLog: slog.NewLogLogger(n.log.Handler(), slog.LevelWarn)}
	var requests requests
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !n.started.Load() && r.URL.Path != admin.PathStatus:
			writeJSON(w, http.StatusServiceUnavailable,
				admin.Answer{APIVersion: admin.Version, Error: "the daemon is starting; try again in a moment"})
		case !requests.begin():
			writeJSON(w, http.StatusServiceUnavailable,
				admin.Answer{APIVersion: admin.Version, Error: "the daemon is stopping"})
		default:
			defer requests.end()
			mux.ServeHTTP(w, r)
		}
	})
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			n.log.Error("admin socket failed", "error", err)
		}
	}()
	n.endAdmin = sync.OnceFunc(func() {
		n.beginStop()
		requests.close(lastRequests)
		// Shutdown waits for callers to take their answers, but also for callers who have connected and asked nothing.
		ctx, cancel := context.WithTimeout(context.Background(), lastAnswers)
		defer cancel()
		if srv.Shutdown(ctx) != nil {
			_ = srv.Close()
		}
		<-done
	})
	n.closing(n.endAdmin)
	return nil
}

// removeStale removes the socket that a daemon has left behind at its end, and nothing else.
func removeStale(path string) error {
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case st.Mode().Type() != os.ModeSocket:
		return fmt.Errorf("%s exists and is no socket: it stays as it is", path)
	}
	c, err := net.Dial("unix", path)
	switch {
	case err == nil:
		_ = c.Close()
		return fmt.Errorf("%s: another daemon answers there", path)
	case errors.Is(err, syscall.ECONNREFUSED):
		err = os.Remove(path)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil // it has just been removed
	}
	return err
}

// lastRequests is how long requests may take when the daemon stops. Those that change something have ended: the others
// are answered from memory, unless a caller does not send what it has announced.
const lastRequests = 100 * time.Millisecond

// lastAnswers is how long callers may take for their answers when the daemon stops.
const lastAnswers = 50 * time.Millisecond

// requests are those that the admin API is answering.
type requests struct {
	mu     sync.Mutex
	n      int
	closed bool
	// none is closed when there are no requests any more after close.
	none chan struct{}
}

// begin counts a request; false: it comes too late.
func (r *requests) begin() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.n++
	return true
}

func (r *requests) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n--; r.n == 0 && r.closed {
		close(r.none)
	}
}

// close lets no request begin any more and waits for those that have begun, for as long as patience. Once.
func (r *requests) close(patience time.Duration) {
	r.mu.Lock()
	r.closed, r.none = true, make(chan struct{})
	if r.n == 0 {
		close(r.none)
	}
	r.mu.Unlock()
	select {
	case <-r.none:
	case <-time.After(patience):
	}
}

// adminAPI returns what answers requests to the admin API.
func (n *Node) adminAPI() *http.ServeMux {
	mux := http.NewServeMux()
	get := func(pattern string, answer func() any) {
		mux.HandleFunc("GET "+pattern, func(w http.ResponseWriter,
			_ *http.Request) {
			writeJSON(w, http.StatusOK, answer())
		})
	}
	get(admin.PathStatus, n.status)
	get(admin.PathSSDs, n.listSSDs)
	get(admin.PathSubsystems, n.listSubsystems)
	get(admin.PathConnections, n.listConnections)
	get(admin.PathTenants, n.listTenants)
	get(admin.PathSwap, n.listSwap)
	get(admin.PathKVAudits, n.listAudits)
	get(admin.PathKVScrubs, n.listScrubs)
	change := func(pattern string, do func(*http.Request) (any, error)) {
		mux.HandleFunc("POST "+pattern, func(w http.ResponseWriter, r *http.Request) {
			// A change may take longer than the server's time limit, and the caller waits for its outcome.
			_ = http.NewResponseController(w).SetWriteDeadline(time.Time{})
			answer, err := do(r)
			if err != nil {
				writeJSON(w, http.StatusConflict, admin.Answer{APIVersion: admin.Version, Error: err.Error()})
				return
			}
			writeJSON(w, http.StatusOK, answer)
		})
	}
	post := func(pattern string, do func(*http.Request) error) {
		change(pattern, func(r *http.Request) (any, error) { return admin.Answer{APIVersion: admin.Version}, do(r) })
	}
	change(admin.PathReload, func(r *http.Request) (any, error) {
		dryRun, err := strconv.ParseBool(cmp.Or(r.URL.Query().Get(admin.ParamDryRun), "false"))
		if err != nil {
			return nil, fmt.Errorf("%s is %q, must be true or false", admin.ParamDryRun,
				r.URL.Query().Get(admin.ParamDryRun))
		}
		changes, err := n.Reload("admin socket", dryRun)
		return admin.Reload{APIVersion: admin.Version, DryRun: dryRun, Changes: changesOf(changes)}, err
	})
	post(admin.PathNamespaceDelete, func(r *http.Request) error {
		var what admin.DeleteNamespace
		if err := readJSON(r, &what); err != nil {
			return err
		}
		return n.DeleteNamespace(what.UUID)
	})
	post(admin.PathSwapDiscard, func(r *http.Request) error {
		var what admin.DiscardSwap
		if err := readJSON(r, &what); err != nil {
			return err
		}
		return n.DiscardSwap(what.UUID)
	})
	post(admin.PathKVOpen, func(r *http.Request) error {
		var what admin.OpenKV
		if err := readJSON(r, &what); err != nil {
			return err
		}
		return n.OpenKV(what.UUID, what.AcceptLoss)
	})
	n.clusterAPI(mux, change)
	mux.HandleFunc("GET "+admin.PathKVExport, n.exportKV)
	change(admin.PathKVImport, n.importKV)
	change(admin.PathKVAudit, func(r *http.Request) (any, error) {
		var what admin.AuditKV
		if err := readJSON(r, &what); err != nil {
			return nil, err
		}
		return n.AuditKV(r.Context(), what.UUID, what.Repair)
	})
	change(admin.PathKVScrub, func(r *http.Request) (any, error) {
		var what admin.ScrubKV
		if err := readJSON(r, &what); err != nil {
			return nil, err
		}
		return n.ScrubKV(what.UUID, what.BytesPerSec)
	})
	return mux
}

// changesOf lists the changes of a reload as the admin API does.
func changesOf(c config.Changes) []admin.Change {
	all := []admin.Change{}
	for _, x := range c.List() {
		all = append(all, admin.Change{What: x.What, Name: x.Name, NSID: x.NSID, SizeBytes: int64(x.Size)})
	}
	return all
}

// readJSON reads what a request asks for.
func readJSON(r *http.Request, into any) error {
	d := json.NewDecoder(http.MaxBytesReader(nil, r.Body, 4<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("request body: %w", err)
	}
	return nil
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(v) // it fails only if the caller has disconnected
}

// config returns the configuration in force.
func (n *Node) config() *config.Config {
	n.cfgMu.Lock()
	defer n.cfgMu.Unlock()
	return n.cfg
}

func (n *Node) status() any {
	s := admin.Status{APIVersion: admin.Version, Version: n.opts.Version, Node: n.config().Node.Name,
		Addresses: admin.Addresses(n.addrs),
		Reasons:   n.reasons()}
	if n.started.Load() {
		s.BufferBytesInUse = n.pool.Stats().InUseBytes
		s.Connections, s.Controllers, s.Hosts = n.service.Counts()
	}
	for _, r := range n.tel.Degraded() {
		s.Degraded = append(s.Degraded, admin.Reason(r))
	}
	s.Ready, s.Change = len(s.Reasons) == 0, n.runningChange()
	return s
}

// reasons says why the node is not ready; it is empty if it is.
func (n *Node) reasons() []admin.Reason {
	all := []admin.Reason{}
	for _, r := range n.tel.Health().Reasons() {
		all = append(all, admin.Reason(r))
	}
	return all
}

func (n *Node) listSSDs() any {
	l := admin.List[admin.SSD]{APIVersion: admin.Version, Items: []admin.SSD{}}
	cfg := n.config()
	for i, d := range n.drives() {
		a := admin.SSD{Name: d.name, Backend: cfg.SSDs[i].Backend, Path: cfg.SSDs[i].Path, Extents: []admin.Extent{}}
		if d.err != nil {
			a.Error = d.err.Error()
			l.Items = append(l.Items, a)
			continue
		}
		info, lab := d.dev.Info(), d.label.Label()
		a.Engine, a.SizeBytes = info.Engine, info.SizeBytes
		a.FreeBytes, a.UUID = lab.FreeBytes(), lab.DriveUUID.String()
		schedulingOf(&a, d.drive)
		if h, ok := d.health(); ok {
			a.Health = admin.NewHealth(&h)
		}
		a.Memory = admin.NewMemory(d.dev)
		if err := d.dev.Healthy(); err != nil {
			a.Error = err.Error()
		}
		for _, e := range lab.Extents {
			a.Extents = append(a.Extents, admin.Extent{UUID: e.UUID.String(), Use: e.Use.String(),
				StartBytes:  int64(e.StartBytes),
				LengthBytes: e.LengthBytes, NSID: e.NSID, SubNQN: e.NQN, Configured: usesExtent(cfg, d.name, e)})
		}
		l.Items = append(l.Items, a)
	}
	return l
}

// usesExtent reports whether cfg uses an extent of that drive, for a namespace or a swap area.
func usesExtent(cfg *config.Config, ssd string, e label.Extent) bool {
	if s, err := cfg.SSD(ssd); err == nil && e.Use == label.Swap {
		return int64(s.KVSwap) == e.LengthBytes
	}
	for _, s := range cfg.Subsystems {
		for _, ns := range s.Namespaces {
			if s.NQN == e.NQN && ns.NSID == e.NSID && ns.SSD == ssd {
				return true
			}
		}
	}
	return false
}

func (n *Node) listSubsystems() any {
	l := admin.List[admin.Subsystem]{APIVersion: admin.Version, Items: []admin.Subsystem{}}
	for _, sc := range n.config().Subsystems {
		s := admin.Subsystem{SubNQN: sc.NQN, AllowAnyHost: sc.AllowAnyHost, Hosts: list(sc.Hosts),
			Namespaces: []admin.Namespace{}}
		for _, nc := range sc.Namespaces {
			s.Namespaces = append(s.Namespaces, n.namespaceInfo(sc.NQN, nc))
		}
		l.Items = append(l.Items, s)
	}
	return l
}

// list returns s, or an empty slice for nil: JSON then has [] and not null.
func list(s []string) []string { return append([]string{}, s...) }

func (n *Node) namespaceInfo(nqn string, nc config.Namespace) admin.Namespace {
	i := admin.Namespace{NSID: nc.NSID, SSD: nc.SSD, SizeBytes: int64(nc.Size), Type: nc.Type,
		BlockSizeBytes: nc.BlockSize,
		Hosts:          list(nc.Hosts), Replicated: nc.Replicated}
	if nc.Type == "kv" {
		i.BlockSizeBytes = 0
	}
	for _, d := range n.drives() {
		if d.name == nc.SSD && d.err != nil {
			i.Error = d.err.Error()
		}
		if d.name == nc.SSD && d.label != nil {
			lab := d.label.Label()
			if k := lab.FindNamespace(nqn, nc.NSID); k >= 0 {
				i.UUID = lab.Extents[k].UUID.String()
				if s := n.publisher.Store(lab.Extents[k].UUID); s != nil {
					st := s.Stats()
					i.Objects, i.UsedBytes, i.SwappedKeys = st.Objects, st.LiveBytes, st.Swap.Keys
				}
				i.Error = cmp.Or(i.Error, n.leftOutReason(lab.Extents[k].UUID), n.cluster.refusal(lab.Extents[k].UUID))
				if loss := n.lossOf(lab.Extents[k].UUID); loss != nil {
					i.Loss = &admin.KVLoss{Statement: loss.Loss.String(), Token: loss.Token(),
						MissingSegments: loss.Segments, FoundSegments: loss.Found}
				}
			} else if nc.Replicated {
				i.Error = "a new partition of the cluster, which is made when the node joins it"
			}
		}
	}
	return i
}

func (n *Node) listConnections() any {
	l := admin.List[admin.Connection]{APIVersion: admin.Version, Items: []admin.Connection{}}
	for _, c := range n.service.Conns() {
		l.Items = append(l.Items, admin.Connection(c.Describe()))
	}
	sort.Slice(l.Items, func(i, j int) bool { return l.Items[i].ID < l.Items[j].ID })
	return l
}

// DeleteNamespace erases the extent of a namespace that is not configured any more
// and frees it.
//
// Errors: there is no such extent, or it is configured, or commands from before it
// was removed are still in flight; errors of the drive.
func (n *Node) DeleteNamespace(name string) error {
	u, err := uuid.Parse(name)
	if err != nil {
		return fmt.Errorf("uuid %q: %w", name, err)
	}
	if err := n.beginChange(deletionOf(name)); err != nil {
		return err
	}
	defer n.endChange()
	for _, d := range n.drives() {
		if d.label == nil {
			continue
		}
		lab := d.label.Label()
		i := lab.Find(u)
		if i < 0 {
			continue
		}
		e := lab.Extents[i]
		if e.Use == label.Swap {
			return fmt.Errorf("%s is a swap area of ssd %s, not a namespace: see jbofctl swap", name, d.name)
		}
		if usesExtent(n.cfg, d.name, e) {
			return fmt.Errorf("namespace %s is configured (subsystem %s, nsid %d): take it out of the configuration "+
				"and reload first", name, e.NQN, e.NSID)
		}
		if !d.serves() {
			return fmt.Errorf("namespace %s is on ssd %s, which is not in service: %w; it can be deleted when the "+
				"drive is", name, d.name, d.err)
		}
		if err := n.erase(d, e); err != nil {
			return fmt.Errorf("ssd %s: erase namespace %s: %w", d.name, name, err)
		}
		if err := d.label.Update(func(l *label.Label) error { return l.Free(e.UUID) }); err != nil {
			return fmt.Errorf("ssd %s: %w", d.name, err)
		}
		for _, a := range n.swapAreas() {
			if a.Area != nil {
				a.Forget(e.UUID)
			}
		}
		n.log.Info("namespace deleted, its extent is free", "ssd", d.name, "uuid", name, "subsystem", e.NQN, "nsid",
			e.NSID,
			"size", config.Bytes(e.LengthBytes).String())
		return nil
	}
	return fmt.Errorf("no drive has a namespace with uuid %s", name)
}
