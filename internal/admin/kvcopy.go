package admin

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"jbofd/internal/nvme"
)

// MaxKVBatch is the longest batch of a KVCopy.
const MaxKVBatch = 1<<20 + 4096

// Parameters of an export: where to continue, behind the key, which is in hexadecimal, of a position.
const (
	ParamUUID     = "uuid"
	ParamPosition = "position"
	ParamKey      = "key"
)

// KVImported answers an import of a batch: how many of its objects and tombstones were newer than what was there.
type KVImported struct {
	APIVersion string `json:"apiVersion"`
	Applied    int    `json:"applied"`
}

// KVTotals are what a KVCopy has.
type KVTotals struct {
	Objects    int64 `json:"objects"`
	Tombstones int64 `json:"tombstones"`
	// ValueBytes is the length of all values, Batches their number, Bytes how long the file is.
	ValueBytes int64 `json:"valueBytes"`
	Batches    int64 `json:"batches"`
	Bytes      int64 `json:"bytes"`
	// LostBatches say that objects are missing where they are, because they are damaged in the namespace.
	LostBatches int64 `json:"lostBatches"`
	// Complete: the last batch is there.
	Complete bool `json:"complete"`
	// Done is which part of the keys was read, from 0 to 1.
	Done float64 `json:"-"`
}

// ErrKVCopy is wrapped by the errors of KVCopy.Next that say that something is no export, or a damaged one.
var ErrKVCopy = errors.New("not a sound export of a key-value namespace")

// ErrOtherNamespace is wrapped by those of them that say that a batch is of another namespace than the ones before.
var ErrOtherNamespace = errors.New("it is of another namespace than the ones before")

// KVCopy reads an export: batches of objects with their values (nvme.KVRange), each with a checksum, which follow each
// other without a gap up to one that is marked as the last.
type KVCopy struct {
	KVTotals
	r  *bufio.Reader
	to nvme.KVCursor
	// origin is that of the batches so far.
	origin uint32
}

// NewKVCopy returns a reader of an export.
func NewKVCopy(r io.Reader) *KVCopy { return &KVCopy{r: bufio.NewReaderSize(r, 1<<16)} }

// Follow returns a reader of what follows, with the totals of both.
func (c *KVCopy) Follow(r io.Reader) *KVCopy {
	next := NewKVCopy(r)
	next.KVTotals, next.to, next.origin = c.KVTotals, c.to, c.origin
	return next
}

// To is the cursor behind the last object that was read.
func (c *KVCopy) To() nvme.KVCursor { return c.to }

// Next returns the next batch, which is sound and follows the one before. At the end of a complete export the error is
// io.EOF.
//
// Errors: ErrKVCopy, saying which batch and what is wrong: with io.ErrUnexpectedEOF if the end is missing, with
// ErrOtherNamespace if batches are of different namespaces. The reader's, without ErrKVCopy.
func (c *KVCopy) Next() (nvme.KVRange, error) {
	bad := func(format string, args ...any) (nvme.KVRange, error) {
		return nil, fmt.Errorf("%w: batch %d, at byte %d: %w", ErrKVCopy, c.Batches+1, c.Bytes,
			fmt.Errorf(format, args...))
	}
	failed := func(err error) (nvme.KVRange, error) {
		return nil, fmt.Errorf("batch %d, at byte %d: %w", c.Batches+1, c.Bytes, err)
	}
	const noEnd = "%w: the end is missing"
	ended := func(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }
	head, err := c.r.Peek(nvme.KVRangeHeaderBytes)
	magic := head[min(len(head), kvMagicAt):min(len(head), kvMagicAt+len(kvMagic))]
	switch {
	case err != nil && !ended(err):
		return failed(err)
	case c.Complete && len(head) > 0:
		return bad("there is something behind the last batch")
	case c.Complete:
		return nil, io.EOF
	case !strings.HasPrefix(kvMagic, string(magic)):
		return bad("it begins with %q, must have %q at byte %d", head[:min(len(head), 16)], kvMagic, kvMagicAt)
	case err != nil:
		return bad(noEnd, io.ErrUnexpectedEOF)
	}
	n := int64(binary.LittleEndian.Uint32(head[12:]))
	if n < nvme.KVRangeHeaderBytes || n > MaxKVBatch {
		return bad("its length is %d, must be %d to %d", n, nvme.KVRangeHeaderBytes, MaxKVBatch)
	}
	b := make(nvme.KVRange, n)
	_, err = io.ReadFull(c.r, b)
	from := b.From()
	follows := b.Kind() == nvme.KVCopy && from.Compare(&c.to) == 0
	switch {
	case err != nil && !ended(err):
		return failed(err)
	case err != nil && follows:
		return bad(noEnd, io.ErrUnexpectedEOF)
	case err != nil:
		return bad("it neither follows the one before nor has an end")
	}
	if err := b.Check(); err != nil {
		return bad("%w", err)
	}
	if !follows {
		return bad("it does not follow the one before: batches are missing")
	}
	if c.Batches > 0 && b.Origin() != c.origin {
		return bad("%w", ErrOtherNamespace)
	}
	c.origin = b.Origin()
	for e := range b.Entries() {
		switch {
		case e.Tombstone():
			c.Tombstones++
		case e.Exists():
			c.Objects++
			c.ValueBytes += int64(e.ValueLen())
		}
	}
	if b.Lost() {
		c.LostBatches++
	}
	c.to, c.Complete = b.To(), b.Complete()
	if c.Done = float64(c.to.Position) / (1 << 64); c.Complete {
		c.Done = 1
	}
	c.Batches++
	c.Bytes += n
	return b, nil
}

// Where each batch has its magic.
const (
	kvMagicAt = 4
	kvMagic   = "KVR"
)

// ExportKV reads all objects of a key-value namespace behind a cursor, in the form of a KVCopy. The caller closes it.
func (c *Client) ExportKV(ctx context.Context, uuid string, from nvme.KVCursor) (io.ReadCloser, error) {
	q := url.Values{ParamUUID: {uuid}, ParamPosition: {strconv.FormatUint(from.Position, 10)},
		ParamKey: {fmt.Sprintf("%x", from.Key[:from.KeyLen])}}
	resp, err := c.send(ctx, http.MethodGet, PathKVExport+"?"+q.Encode(), nil)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= http.StatusBadRequest {
		defer resp.Body.Close()
		data, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
		return nil, refused(resp, data)
	}
	return resp.Body, nil
}

// ImportKV stores the objects and tombstones of a batch that are newer than what a key-value namespace has.
func (c *Client) ImportKV(ctx context.Context, uuid string, batch nvme.KVRange) (a KVImported, err error) {
	resp, err := c.send(ctx, http.MethodPost, PathKVImport+"?"+url.Values{ParamUUID: {uuid}}.Encode(),
		bytes.NewReader(batch))
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	switch {
	case err != nil:
		return a, fmt.Errorf("admin socket %s: %w", c.socket, err)
	case resp.StatusCode >= http.StatusBadRequest:
		return a, refused(resp, data)
	}
	return a, json.Unmarshal(data, &a)
}

// refused is the error of a request that the daemon has refused.
func refused(resp *http.Response, data []byte) error {
	var a Answer
	if json.Unmarshal(data, &a) != nil || a.Error == "" {
		a.Error = resp.Status
	}
	err := fmt.Errorf("%w: %s", ErrRefused, a.Error)
	if resp.StatusCode == http.StatusServiceUnavailable {
		return &notNow{err}
	}
	return err
}

// notNow is a refusal that is ErrNotNow. Its text says which of the two.
type notNow struct{ error }

func (e *notNow) Is(target error) bool { return target == ErrNotNow }
func (e *notNow) Unwrap() error        { return e.error }
