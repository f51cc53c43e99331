package kv

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"jbofd/client"
	"jbofd/client/internal/kvop"
)

// Object is what is known of a value besides the value.
type Object struct {
	// Version is greater than those of all values that the key had before. No two values in a namespace have the same.
	Version uint64
	// Expires is when the key ceases to exist, by the target's clock; zero: never.
	Expires time.Time
	// Size is the size of the whole value.
	Size int
}

// VersionError reports a write whose condition on the version did not hold. errors.Is matches it with
// ErrVersionMismatch or ErrSuperseded.
type VersionError struct {
	// Current is the version that the key has; 0: it does not exist.
	Current uint64
	Err     error
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("%v: the key has version %d", e.Err, e.Current)
}

// Unwrap implements errors.Is.
func (e *VersionError) Unwrap() error { return e.Err }

// Condition restricts a PutWith or DeleteWith.
type Condition uint8

// Conditions.
const (
	// Always is no condition.
	Always Condition = iota
	// IfAbsent: the key must not exist. PutWith only.
	IfAbsent
	// IfPresent: the key must exist. PutWith only.
	IfPresent
	// IfVersion: the key must have the version of the options; 0: it must not exist (PutWith only).
	IfVersion
	// IfNewer: the key gets the version of the options, which must be newer than the one that it has, or had when it
	// was deleted with a tombstone. Copies of a namespace follow it so, in whatever order they learn of its changes.
	IfNewer
)

// PutOptions are those of PutWith. The zero value is a Put.
type PutOptions struct {
	If      Condition
	Version uint64
	// TTL is for how long the key exists from now on, by the target's clock, in whole seconds, rounded up. Expires is
	// when it ceases to exist, instead. Neither: it exists until it is deleted.
	TTL     time.Duration
	Expires time.Time
}

// DeleteOptions are those of DeleteWith. The zero value is a Delete.
type DeleteOptions struct {
	If      Condition
	Version uint64
	// Tombstone leaves a tombstone: the key does not exist any more, but its version counts for IfNewer. TTL or Expires
	// is when the tombstone may go; neither: never.
	Tombstone bool
	TTL       time.Duration
	Expires   time.Time
}

// GetVersion is Get, and returns what is known of the value besides.
//
// Errors: client.ErrUnsupported without extended key-value; those of Get.
func (n *Namespace) GetVersion(ctx context.Context, key, dst []byte) (Object, error) {
	out, err := n.run(ctx, kvop.Args{Kind: GetVersion, Key: key, Value: dst})
	if err != nil {
		return Object{}, err
	}
	o := Object{Version: out.version, Size: out.size}
	if out.expires != 0 {
		o.Expires = time.Unix(int64(out.expires), 0)
	}
	return o, nil
}

// PutIfVersion stores value under key if the key has that version, 0: if it does not exist, and returns the new
// version.
//
// Errors: ErrVersionMismatch, with a *VersionError; client.ErrUnsupported without extended key-value; those of Put.
func (n *Namespace) PutIfVersion(ctx context.Context, key, value []byte, version uint64) (uint64, error) {
	return n.PutWith(ctx, key, value, PutOptions{If: IfVersion, Version: version})
}

// Op returns the PutWith of a value as an operation for a queue.
//
// Errors: client.ErrInvalid.
func (o PutOptions) Op(key, value []byte) (op Op, err error) {
	op = Op{Key: key, Value: value, Version: o.Version, WantVersion: true}
	switch o.If {
	case Always:
		op.Kind = Put
	case IfAbsent:
		op.Kind = PutIfAbsent
	case IfPresent:
		op.Kind = PutIfPresent
	case IfVersion:
		op.Kind = PutIfVersion
	case IfNewer:
		op.Kind = PutIfNewer
	default:
		return op, fmt.Errorf("%w: PutWith: If is %d", client.ErrInvalid, o.If)
	}
	if op.Expires, op.ExpiresIn, err = expiry(o.TTL, o.Expires); err != nil {
		return op, fmt.Errorf("PutWith: %w", err)
	}
	return op, nil
}

// PutWith stores value under key as the options say, and returns the version that it has been given.
//
// Errors: ErrKeyExists, ErrKeyNotFound, ErrVersionMismatch or ErrSuperseded if the condition does not hold;
// client.ErrUnsupported without extended key-value; client.ErrInvalid; those of Put.
func (n *Namespace) PutWith(ctx context.Context, key, value []byte, o PutOptions) (version uint64, err error) {
	op, err := o.Op(key, value)
	if err != nil {
		return 0, err
	}
	return n.write(ctx, op.args())
}

// DeleteWith deletes key as the options say, and returns the version of the deletion, or 0 if there was nothing to
// delete.
//
// Errors: ErrVersionMismatch or ErrSuperseded if the condition does not hold; client.ErrUnsupported without extended
// key-value; client.ErrInvalid; those of Delete.
func (n *Namespace) DeleteWith(ctx context.Context, key []byte, o DeleteOptions) (version uint64, err error) {
	a := kvop.Args{Key: key, Version: o.Version, Tombstone: o.Tombstone, WantVersion: true}
	switch o.If {
	case Always:
		a.Kind = Delete
	case IfVersion:
		a.Kind = DeleteIfVersion
	case IfNewer:
		a.Kind = DeleteIfNewer
	default:
		return 0, fmt.Errorf("%w: DeleteWith: If is %d", client.ErrInvalid, o.If)
	}
	if a.Expires, a.Relative, err = expiry(o.TTL, o.Expires); err != nil {
		return 0, fmt.Errorf("DeleteWith: %w", err)
	}
	return n.write(ctx, a)
}

// write runs a write that reports a version.
func (n *Namespace) write(ctx context.Context, a kvop.Args) (version uint64, err error) {
	out, err := n.run(ctx, a)
	if err != nil {
		return 0, err
	}
	return out.version, nil
}

// expiry returns the time of a header for a TTL or a time.
func expiry(ttl time.Duration, at time.Time) (seconds uint32, relative bool, err error) {
	var s int64
	switch {
	case ttl == 0 && at.IsZero():
		return 0, false, nil
	case ttl != 0 && !at.IsZero():
		return 0, false, fmt.Errorf("%w: both TTL and Expires are set", client.ErrInvalid)
	case ttl != 0:
		s, relative = int64((ttl+time.Second-1)/time.Second), true
	default:
		s = at.Unix()
	}
	if s < 1 || s > math.MaxUint32 {
		return 0, false, fmt.Errorf("%w: it expires in or at %d seconds, must be 1 to %d", client.ErrInvalid, s,
			uint32(math.MaxUint32))
	}
	return uint32(s), relative, nil
}

// Update replaces the value of key by what f makes of it, in spite of other hosts and goroutines that write the key: it
// reads the value, calls f and stores the result if the key still has the version that was read; otherwise it begins
// again. f gets nil if the key does not exist, and may be called several times; with an error Update ends, and returns
// it. It returns the version of the new value.
//
// Errors: f's; those of PutIfVersion, except ErrVersionMismatch; those of Value.
func (n *Namespace) Update(ctx context.Context, key []byte, f func(old []byte) ([]byte, error)) (uint64, error) {
	for b := make([]byte, firstGet); ; {
		o, err := n.GetVersion(ctx, key, b)
		var old []byte
		switch {
		case errors.Is(err, ErrKeyNotFound):
		case err != nil:
			return 0, err
		case o.Size > len(b):
			if limit := n.geo.Load().info.MaxVersionedValue; o.Size > limit {
				return 0, fmt.Errorf("%w: Update of %d bytes: MaxVersionedValue is %d", ErrValueTooLarge, o.Size, limit)
			}
			b = make([]byte, o.Size)
			continue
		default:
			old = b[:o.Size:o.Size]
		}
		value, err := f(old)
		if err != nil {
			return 0, err
		}
		v, err := n.PutIfVersion(ctx, key, value, o.Version)
		if !errors.Is(err, ErrVersionMismatch) {
			return v, err
		}
	}
}
