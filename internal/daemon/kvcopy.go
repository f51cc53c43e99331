package daemon

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/config"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/target"
	"jbofd/internal/partition"
	"jbofd/internal/publish"
	"jbofd/internal/ssd/label"
	"jbofd/internal/uuid"
)

// copySink is the Sink of the one Request of an export or import.
type copySink chan struct{}

// KVDone implements partition.Sink.
func (s copySink) KVDone(*partition.Request) bool {
	s <- struct{}{}
	return false
}

// Kick implements partition.Sink.
func (s copySink) Kick() {}

// storeOf returns the store of the namespace that a request of the admin API names.
func (n *Node) storeOf(r *http.Request) (*publish.Store, error) {
	name := r.URL.Query().Get(admin.ParamUUID)
	u, err := uuid.Parse(name)
	if err != nil {
		return nil, fmt.Errorf("uuid %q: %w", name, err)
	}
	s := n.publisher.Store(u)
	if s == nil {
		return nil, n.noStore(u)
	}
	return s, nil
}

// noStore says why there is no store of a namespace.
func (n *Node) noStore(u uuid.UUID) error {
	for _, d := range n.drives() {
		if d.label == nil {
			continue
		}
		for _, e := range d.label.Label().Extents {
			if e.UUID == u && e.Use != label.KV {
				return fmt.Errorf("namespace %s is of type %s; must be kv", u, e.Use)
			}
		}
	}
	if reason := n.leftOutReason(u); reason != "" {
		return fmt.Errorf("namespace %s is not served: %s", u, reason)
	}
	return fmt.Errorf("no key-value namespace %s is served", u)
}

// copyRequest runs a Request at the weight of the background.
func copyRequest(s *publish.Store, q *partition.Request) {
	done := make(copySink, 1)
	q.Sink, q.Tenant, q.Background = done, target.Background, true
	var b partition.Batch
	b.Add(q)
	s.Submit(&b)
	<-done
}

// exportKV answers a request for an export with batches, one after the other, as they come from the store. If one
// cannot be had, the connection is cut, and the caller may continue behind the last one that it has.
func (n *Node) exportKV(w http.ResponseWriter, r *http.Request) {
	s, err := n.storeOf(r)
	q := &partition.Request{Op: kvstore.CopyOut, Range: kvstore.Range{Last: math.MaxUint64},
		Value: make([]byte, kvstore.MaxRangeBytes)}
	if err == nil {
		err = cursorOf(r, q)
	}
	if err != nil {
		writeJSON(w, http.StatusConflict, admin.Answer{APIVersion: admin.Version, Error: err.Error()})
		return
	}
	log := n.log.With("subsystem", s.NQN, "nsid", s.NSID)
	log.Info("export of a key-value namespace begins")
	out := http.NewResponseController(w)
	w.Header().Set("Content-Type", "application/octet-stream")
	for bytes := int64(0); ; {
		copyRequest(s, q)
		b := nvme.KVRange(q.Value[:min(q.ValueLen, len(q.Value))])
		// With Corrupt and DeviceError the result is valid, and says that something is missing.
		valid := q.Status == kvstore.OK || q.Status == kvstore.Corrupt || q.Status == kvstore.DeviceError
		if !valid || b.Check() != nil {
			log.Warn("export of a key-value namespace ended early", "status", q.Status)
			panic(http.ErrAbortHandler)
		}
		b = b[:b.LenBytes()]
		b.SetOrigin(s.Origin()) // so that an export is not taken up with the keys of another namespace
		b.Seal()
		_ = out.SetWriteDeadline(time.Now().Add(copyPatience))
		if _, err := w.Write(b); err != nil {
			log.Warn("export of a key-value namespace ended early", "error", err)
			return
		}
		if bytes += int64(len(b)); b.Complete() {
			log.Info("export of a key-value namespace ended", "bytes", bytes)
			return
		}
		select {
		case <-n.stopping:
			panic(http.ErrAbortHandler)
		case <-r.Context().Done():
			return
		default:
		}
		to := b.To()
		q.Range.From, q.Key, q.KeyLen = to.Position, to.Key, to.KeyLen
	}
}

// copyPatience is how long a caller may take for a batch of an export.
const copyPatience = 60 * time.Second

// cursorOf reads where an export is to begin.
func cursorOf(r *http.Request, q *partition.Request) (err error) {
	if p := r.URL.Query().Get(admin.ParamPosition); p != "" {
		if q.Range.From, err = strconv.ParseUint(p, 10, 64); err != nil {
			return fmt.Errorf("%s: %w", admin.ParamPosition, err)
		}
	}
	key, err := hex.DecodeString(r.URL.Query().Get(admin.ParamKey))
	if err != nil || len(key) > len(q.Key) {
		return fmt.Errorf("%s is %q, want up to 16 bytes in hexadecimal", admin.ParamKey,
			r.URL.Query().Get(admin.ParamKey))
	}
	q.KeyLen = uint8(copy(q.Key[:], key))
	return nil
}

// importKV stores a batch.
func (n *Node) importKV(r *http.Request) (any, error) {
	// The body is read before anything is refused: who still sends when the connection ends does not read why.
	b, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, kvstore.MaxRangeBytes))
	if err != nil {
		return nil, fmt.Errorf("request body: %w", err)
	}
	s, err := n.storeOf(r)
	if err != nil {
		return nil, err
	}
	if n.isReplicated(s.UUID) {
		return nil, fmt.Errorf("namespace %s is a partition of the cluster: %w", s.UUID, errReplicated)
	}
	if err := nvme.KVRange(b).Check(); err != nil {
		return nil, err
	}
	q := &partition.Request{Op: kvstore.CopyIn, Value: b, Restore: true}
	if err := n.copyIn(r, s, q); err != nil {
		return nil, err
	}
	switch q.Status {
	case kvstore.OK:
		return admin.KVImported{APIVersion: admin.Version, Applied: q.ValueLen}, nil
	case kvstore.CapacityExceeded:
		return nil, fmt.Errorf("the namespace is full with its size of %s; make it larger and repeat the import",
			config.Bytes(s.SizeBytes()))
	case kvstore.Superseded:
		return nil, errors.New("a batch was not stored: it has keys of a range that was dropped and is still being " +
			"cleared; repeat the import later. If the namespace has damage, only jbofctl kv repair lets that end")
	}
	return nil, fmt.Errorf("a batch was not stored: status %d; the import may be repeated", q.Status)
}

// How often a batch is offered to a store again that clears what was dropped, and for how long.
const dropRetry = 100 * time.Millisecond

var dropPatience = 60 * time.Second

// copyIn runs a CopyIn. As long as a Drop covers some of it the store takes nothing of it, so that it is repeated until
// the Drop is off the list: who imports what was dropped wants it back.
func (n *Node) copyIn(r *http.Request, s *publish.Store, q *partition.Request) error {
	for until := time.Now().Add(dropPatience); ; {
		copyRequest(s, q)
		if q.Status != kvstore.Superseded || time.Now().After(until) {
			return nil
		}
		select {
		case <-n.stopping:
			return errors.New("the daemon stops; repeat the import")
		case <-r.Context().Done():
			return r.Context().Err()
		case <-time.After(dropRetry):
		}
	}
}
