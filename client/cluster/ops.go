package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"jbofd/client"
	"jbofd/client/internal/kvop"
	"jbofd/client/kv"
	"jbofd/internal/flowctl"
)

// Tenant is a user of a Store. The tenants of a Store share what its targets take of the Store, by their weights: one
// that has many operations outstanding does not hold up the others. Any goroutine may call the methods of a Tenant.
type Tenant struct {
	s  *Store
	id flowctl.Tenant
}

// MaxTenants bounds the tenants of a Store.
const MaxTenants = 1024

// AddTenant adds a tenant, which stays as long as the Store: of weight 2, it is given twice as much of what is short as
// one of weight 1, such as the Store itself.
//
// Errors: client.ErrInvalid for a weight of less than 1 or more than 1000, and for more than MaxTenants tenants.
func (s *Store) AddTenant(weight int) (*Tenant, error) {
	if weight < 1 || weight > 1000 {
		return nil, fmt.Errorf("%w: a tenant of weight %d, must be 1 to 1000", client.ErrInvalid, weight)
	}
	e := s.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.flow.Tenants() >= MaxTenants {
		return nil, fmt.Errorf("%w: more than %d tenants", client.ErrInvalid, MaxTenants)
	}
	return &Tenant{s: s, id: e.flow.AddTenant(weight)}, nil
}

// do runs an operation to its end.
func (t *Tenant) do(ctx context.Context, a kvop.Args) (res kv.Result, err error) {
	s := t.s
	r := s.engine.take()
	if r == nil {
		return res, fmt.Errorf("cluster %s: %w", s.o.SubNQN, client.ErrClosed)
	}
	defer s.engine.give(r)
	r.tenant, r.wrap = t.id, true
	if err := r.begin(&a); err != nil {
		return r.res, err
	}
	if use := s.engine.start(r); ctx.Done() != nil {
		stop := context.AfterFunc(ctx, func() { s.engine.cancelOp(r, use, ctx.Err()) })
		defer stop()
	}
	<-r.ended
	return r.res, r.err
}

// Get copies the value of key to dst, as much as fits, and returns the size of the whole value, which may be greater
// than len(dst).
//
// Errors: kv.ErrKeyNotFound; kv.ErrValueTooLarge if one command cannot transfer as much of the value as fits.
func (t *Tenant) Get(ctx context.Context, key, dst []byte) (size int, err error) {
	res, err := t.do(ctx, kvop.Args{Kind: kv.Get, Key: key, Value: dst})
	return res.Size, err
}

// Put stores value under key, and replaces an earlier value.
//
// Errors: kv.ErrValueTooLarge, kv.ErrCapacityExceeded.
func (t *Tenant) Put(ctx context.Context, key, value []byte) error {
	_, err := t.do(ctx, kvop.Args{Kind: kv.Put, Key: key, Value: value})
	return err
}

// PutIfAbsent stores value under key if the key does not exist.
//
// Errors: kv.ErrKeyExists; those of Put.
func (t *Tenant) PutIfAbsent(ctx context.Context, key, value []byte) error {
	_, err := t.do(ctx, kvop.Args{Kind: kv.PutIfAbsent, Key: key, Value: value})
	return err
}

// PutIfPresent stores value under key if the key exists.
//
// Errors: kv.ErrKeyNotFound; those of Put.
func (t *Tenant) PutIfPresent(ctx context.Context, key, value []byte) error {
	_, err := t.do(ctx, kvop.Args{Kind: kv.PutIfPresent, Key: key, Value: value})
	return err
}

// Delete deletes key and its value. It succeeds if the key does not exist.
func (t *Tenant) Delete(ctx context.Context, key []byte) error {
	_, err := t.do(ctx, kvop.Args{Kind: kv.Delete, Key: key})
	return err
}

// Exists reports whether key exists.
func (t *Tenant) Exists(ctx context.Context, key []byte) (bool, error) {
	_, err := t.do(ctx, kvop.Args{Kind: kv.Exists, Key: key})
	if errors.Is(err, kv.ErrKeyNotFound) {
		return false, nil
	}
	return err == nil, err
}

// GetVersion is Get, and returns what is known of the value besides.
func (t *Tenant) GetVersion(ctx context.Context, key, dst []byte) (kv.Object, error) {
	res, err := t.do(ctx, kvop.Args{Kind: kv.GetVersion, Key: key, Value: dst})
	if err != nil {
		return kv.Object{}, err
	}
	o := kv.Object{Version: res.Version, Size: res.Size}
	if res.Expires != 0 {
		o.Expires = time.Unix(int64(res.Expires), 0)
	}
	return o, nil
}

// PutIfVersion stores value under key if the key has that version, 0: if it does not exist, and returns the new
// version.
//
// Errors: kv.ErrVersionMismatch, with a *kv.VersionError; those of Put.
func (t *Tenant) PutIfVersion(ctx context.Context, key, value []byte, version uint64) (uint64, error) {
	return t.PutWith(ctx, key, value, kv.PutOptions{If: kv.IfVersion, Version: version})
}

// PutWith stores value under key as the options say, and returns the version that it has been given. kv.IfNewer is not
// offered, because the ChainHead gives versions.
//
// Errors: kv.ErrKeyExists, ErrKeyNotFound or ErrVersionMismatch if the condition does not hold; client.ErrInvalid;
// those of Put.
func (t *Tenant) PutWith(ctx context.Context, key, value []byte, o kv.PutOptions) (version uint64, err error) {
	op, err := o.Op(key, value)
	if err != nil {
		return 0, err
	}
	return t.write(ctx, op)
}

// DeleteIfVersion deletes key if it has that version, and returns the version of the deletion.
//
// Errors: kv.ErrVersionMismatch, with a *kv.VersionError.
func (t *Tenant) DeleteIfVersion(ctx context.Context, key []byte, version uint64) (uint64, error) {
	return t.write(ctx, kv.Op{Kind: kv.DeleteIfVersion, Key: key, Version: version})
}

// write runs a write that reports a version.
func (t *Tenant) write(ctx context.Context, op kv.Op) (version uint64, err error) {
	if err := offered(op.Kind); err != nil {
		return 0, err
	}
	res, err := t.do(ctx, args(&op))
	if err != nil {
		return 0, err
	}
	return res.Version, nil
}

// offered returns an error for an operation that clusters do not have.
func offered(k kv.Kind) error { // hot: 0 allocs
	if k == kv.PutIfNewer || k == kv.DeleteIfNewer {
		return errNewer
	}
	return nil
}

var errNewer = fmt.Errorf("%w: in a cluster the ChainHead gives versions: PutIfNewer and DeleteIfNewer are not offered",
	client.ErrUnsupported)

// args returns an operation without an identity.
func args(o *kv.Op) kvop.Args { // hot: 0 allocs
	return kvop.Args{Kind: o.Kind, Key: o.Key, Value: o.Value, Version: o.Version, Expires: o.Expires,
		Relative: o.ExpiresIn, Tombstone: o.Tombstone, WantVersion: o.WantVersion}
}
