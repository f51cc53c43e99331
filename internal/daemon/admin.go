package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"time"

	"jbofd/internal/config"
	"jbofd/internal/nvmeof/fabric"
	"jbofd/internal/telemetry"
)

// The admin API is HTTP with JSON over a unix socket that only its owner may
// open. It answers GET /v1/status, /v1/ssds, /v1/subsystems, /v1/connections and
// POST /v1/reload. jbofctl is its client.

// APIVersion is the version of the admin API's JSON.
const APIVersion = "jbofd/v1"

// Status is the answer to GET /v1/status.
type Status struct {
	APIVersion  string             `json:"apiVersion"`
	Version     string             `json:"version"`
	Node        string             `json:"node"`
	Addresses   Addresses          `json:"addresses"`
	Ready       bool               `json:"ready"`
	Reasons     []telemetry.Reason `json:"reasons"`
	Connections int                `json:"connections"`
	Controllers int                `json:"controllers"`
	Hosts       int                `json:"hosts"`
	BufferBytes int64              `json:"bufferBytesInUse"`
}

// SSDInfo is one drive in the answer to GET /v1/ssds.
type SSDInfo struct {
	Name      string       `json:"name"`
	Backend   string       `json:"backend"`
	Path      string       `json:"path,omitempty"`
	Engine    string       `json:"engine"`
	SizeBytes int64        `json:"sizeBytes"`
	FreeBytes int64        `json:"freeBytes"`
	Error     string       `json:"error,omitempty"`
	Drive     string       `json:"drive,omitempty"`
	Extents   []ExtentInfo `json:"extents"`
}

// ExtentInfo is one extent of a drive.
type ExtentInfo struct {
	UUID        string `json:"uuid"`
	Use         string `json:"use"`
	StartBytes  int64  `json:"startBytes"`
	LengthBytes int64  `json:"lengthBytes"`
	NSID        uint32 `json:"nsid"`
	NQN         string `json:"nqn"`
}

// List is the answer of the lists.
type List[T any] struct {
	APIVersion string `json:"apiVersion"`
	Items      []T    `json:"items"`
}

// SubsystemInfo is one subsystem in the answer to GET /v1/subsystems.
type SubsystemInfo struct {
	NQN          string          `json:"nqn"`
	AllowAnyHost bool            `json:"allowAnyHost"`
	Hosts        []string        `json:"hosts"`
	Namespaces   []NamespaceInfo `json:"namespaces"`
}

// NamespaceInfo is one namespace of a subsystem.
type NamespaceInfo struct {
	NSID      uint32   `json:"nsid"`
	SSD       string   `json:"ssd"`
	SizeBytes int64    `json:"sizeBytes"`
	BlockSize int      `json:"blockSize"`
	UUID      string   `json:"uuid"`
	Hosts     []string `json:"hosts"`
}

// serveAdmin starts the admin API.
func (n *Node) serveAdmin() error {
	path := n.cfg.Admin.Socket
	if path == "" {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("admin.socket: %w", err)
	}
	if c, err := net.Dial("unix", path); err == nil {
		_ = c.Close()
		return fmt.Errorf("admin.socket %s: another daemon answers there", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("admin.socket: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("admin.socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return fmt.Errorf("admin.socket: %w", err)
	}
	mux := http.NewServeMux()
	get := func(pattern string, answer func() any) {
		mux.HandleFunc("GET "+pattern, func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, answer()) })
	}
	get("/v1/status", n.status)
	get("/v1/ssds", n.listSSDs)
	get("/v1/subsystems", n.listSubsystems)
	get("/v1/connections", n.listConnections)
	mux.HandleFunc("POST /v1/reload", func(w http.ResponseWriter, _ *http.Request) {
		if err := n.Reload(); err != nil {
			writeJSON(w, http.StatusConflict, map[string]string{"apiVersion": APIVersion, "error": err.Error()})
			return
		}
		writeJSON(w, http.StatusOK, map[string]string{"apiVersion": APIVersion})
	})
	srv := &http.Server{Handler: mux, ReadTimeout: 5 * time.Second, WriteTimeout: 30 * time.Second, MaxHeaderBytes: 8 << 10}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			n.log.Error("admin socket failed", "error", err)
		}
	}()
	n.closing(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = srv.Shutdown(ctx)
		<-done
	})
	return nil
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(v) // the caller has gone: nobody to tell
}

func (n *Node) status() any {
	s := Status{APIVersion: APIVersion, Version: n.opts.Version, Node: n.cfg.Node.Name, Addresses: n.addrs, BufferBytes: n.pool.Stats().InUseBytes}
	s.Connections, s.Controllers, s.Hosts = n.fab.Counts()
	s.Reasons = n.tel.Health().Reasons()
	s.Ready = len(s.Reasons) == 0
	return s
}

func (n *Node) listSSDs() any {
	l := List[SSDInfo]{APIVersion: APIVersion, Items: []SSDInfo{}}
	for _, d := range n.ssds {
		i := SSDInfo{Name: d.name, Extents: []ExtentInfo{}}
		if d.err != nil {
			i.Error = d.err.Error()
			l.Items = append(l.Items, i)
			continue
		}
		info, lab := d.dev.Info(), d.label.Label()
		i.Backend, i.Path, i.Engine, i.SizeBytes = info.Backend, info.Path, info.Engine, info.SizeBytes
		i.FreeBytes, i.Drive = lab.FreeBytes(), lab.DriveUUID.String()
		if err := d.dev.Healthy(); err != nil {
			i.Error = err.Error()
		}
		for _, e := range lab.Extents {
			i.Extents = append(i.Extents, ExtentInfo{UUID: e.UUID.String(), Use: e.Use.String(), StartBytes: e.StartBytes,
				LengthBytes: e.LengthBytes, NSID: e.NSID, NQN: e.NQN})
		}
		l.Items = append(l.Items, i)
	}
	return l
}

func (n *Node) listSubsystems() any {
	l := List[SubsystemInfo]{APIVersion: APIVersion, Items: []SubsystemInfo{}}
	n.reload.Lock()
	cfg := n.cfg
	n.reload.Unlock()
	for _, sc := range cfg.Subsystems {
		s := SubsystemInfo{NQN: sc.NQN, AllowAnyHost: sc.AllowAnyHost, Hosts: sc.Hosts, Namespaces: []NamespaceInfo{}}
		for _, nc := range sc.Namespaces {
			s.Namespaces = append(s.Namespaces, n.namespaceInfo(sc.NQN, nc))
		}
		l.Items = append(l.Items, s)
	}
	return l
}

func (n *Node) namespaceInfo(nqn string, nc config.Namespace) NamespaceInfo {
	i := NamespaceInfo{NSID: nc.NSID, SSD: nc.SSD, SizeBytes: int64(nc.Size), BlockSize: nc.BlockSize, Hosts: nc.Hosts}
	for _, d := range n.ssds {
		if d.name == nc.SSD && d.label != nil {
			lab := d.label.Label()
			if k := lab.FindNamespace(nqn, nc.NSID); k >= 0 {
				i.UUID = lab.Extents[k].UUID.String()
			}
		}
	}
	return i
}

func (n *Node) listConnections() any {
	l := List[fabric.ConnInfo]{APIVersion: APIVersion, Items: []fabric.ConnInfo{}}
	for _, c := range n.fab.Conns() {
		l.Items = append(l.Items, c.Describe())
	}
	sort.Slice(l.Items, func(i, j int) bool { return l.Items[i].ID < l.Items[j].ID })
	return l
}
