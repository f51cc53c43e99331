package kv

import (
	"context"
	"fmt"
	"iter"
	"math"
	"time"

	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
)

// Range is a range of positions. The position of a key is a hash of it. Namespaces that were made with the same hash
// seed have the same keys at the same positions; only their digests can be compared. Use All for everything.
//
// The methods that take a Range need extended key-value (client.ErrUnsupported). They send as many commands as are
// needed, one after the other, and go on where they were after a loss of the connection. What is stored and deleted
// meanwhile may be seen or not; what exists all the time is seen exactly once. With Options.LongKeys, keys are the
// hashes that the target knows, and values have the long keys in front of them.
type Range struct {
	// First and Last are positions, inclusive.
	First, Last uint64
	// After, if set, is a key of the range behind which to begin. First does not count then. The position of the key
	// must be at most Last, else the target refuses the command: a *client.StatusError with Invalid Field.
	After []byte
}

// All is the range of everything.
func All() Range { return Range{Last: math.MaxUint64} }

// Entry is an object of a range, or a tombstone.
type Entry struct {
	Object
	// Key is valid until the next iteration, and so is Value, which only a Batch has.
	Key, Value []byte
	Position   uint64
	Tombstone  bool
}

// LostError says that objects may be missing in a part of a range, because their records at the target are damaged or
// cannot be read. It does not end a sequence: what comes behind To follows. A later sequence begins behind the part
// with Range.First To+1, unless To is math.MaxUint64. A replica may have the objects; a repetition may find them, if
// the drive has failed for a while only.
type LostError struct {
	// From and To are the positions of the part, inclusive.
	From, To uint64
}

func (e *LostError) Error() string {
	return fmt.Sprintf("objects at positions %#x to %#x may be lost", e.From, e.To)
}

// rangeBytes is the size of the buffer of a Scan, copyBytes at most that of a CopyOut: the longest value fits.
const (
	rangeBytes = 64 << 10
	copyBytes  = 1<<20 + nvme.KVEntryOverhead
)

// from is where a Range begins.
func (r *Range) from() (nvme.KVCursor, error) {
	switch {
	case len(r.After) > nvme.MaxKVKey:
		return nvme.KVCursor{}, fmt.Errorf("%w: Range.After has %d bytes, must have at most %d", client.ErrInvalid,
			len(r.After), nvme.MaxKVKey)
	case len(r.After) == 0:
		if err := r.checkOrder(); err != nil {
			return nvme.KVCursor{}, err
		}
	}
	return nvme.KVCursorAt(r.First, r.After), nil
}

// checkOrder returns an error if First is behind Last.
func (r *Range) checkOrder() error {
	if r.First > r.Last {
		return fmt.Errorf("%w: Range.First is %#x, must be at most Last, which is %#x", client.ErrInvalid, r.First,
			r.Last)
	}
	return nil
}

// withoutKey checks a range for a command that cannot begin behind a key.
func (r *Range) withoutKey(command string) error {
	if r.After != nil {
		return fmt.Errorf("%w: %s: Range.After is a key of %d bytes, must be nil", client.ErrInvalid, command,
			len(r.After))
	}
	return r.checkOrder()
}

// rangeCommand is a command that reads a range: what it is besides the range.
type rangeCommand struct {
	opcode uint8
	name   string
	kind   nvme.KVRangeKind
	bytes  int // of its buffer
	shift  uint8
	time   uint32
}

// readRange sends commands until a range is complete, and yields their results.
func (n *Namespace) readRange(ctx context.Context, r Range, rc rangeCommand) iter.Seq2[nvme.KVRange, error] {
	return func(yield func(nvme.KVRange, error) bool) {
		from, err := r.from()
		if err == nil && !n.geo.Load().space.Extended {
			err = fmt.Errorf("%w: %s needs extended key-value", client.ErrUnsupported, rc.name)
		}
		if err != nil {
			yield(nil, err)
			return
		}
		buf := make([]byte, min(rc.bytes, n.geo.Load().space.MaxTransfer))
		for complete := false; !complete; {
			b, err := n.readPart(ctx, from, r.Last, &rc, buf)
			if err != nil {
				yield(nil, err)
				return
			}
			if !yield(b, nil) {
				return
			}
			from, complete = b.To(), b.Complete()
		}
	}
}

// readPart runs one command.
func (n *Namespace) readPart(ctx context.Context, from nvme.KVCursor, last uint64, rc *rangeCommand, buf []byte) (
	nvme.KVRange, error) {
	cmd := client.Command{Data: buf}
	cmd.SQE.SetOpcode(rc.opcode)
	cmd.SQE.SetNSID(n.nsid)
	q := cmd.SQE.KVRange()
	q.SetLenBytes(uint32(len(buf)))
	q.SetFrom(from)
	q.SetLast(last)
	q.SetShift(rc.shift)
	if from.KeyLen == 0 {
		// The time is where the end of a key would be. Only a Digest has one, and it never continues behind a key.
		q.SetTime(rc.time)
	}
	comp, err := n.c.Do(ctx, rc.name, true, &cmd)
	if err != nil {
		return nil, err
	}
	size := int(uint32(comp.Result))
	if comp.Status.Code() == nvme.InvalidValueSize && size > len(buf) {
		return nil, fmt.Errorf("%w: %s: the object behind position %#x takes %d bytes with its header, one command "+
			"transfers %d (MDTS)", ErrValueTooLarge, rc.name, from.Position, size, len(buf))
	}
	if err := host.CheckStatus(rc.name, comp.Status); err != nil {
		return nil, err
	}
	if size > len(buf) || n.geo.Load().space.Counted && int(comp.Received) < size {
		return nil, fmt.Errorf("%w: %s: %d of %d bytes were received", client.ErrProtocol, rc.name, comp.Received, size)
	}
	b := nvme.KVRange(buf[:size])
	if err := b.Check(); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", client.ErrProtocol, rc.name, err)
	}
	// From has the position of a key, which the host may not know.
	got, to := b.From(), b.To()
	if b.Kind() != rc.kind || b.Last() != last || !b.Complete() && got.Compare(&to) >= 0 ||
		got.KeyLen != from.KeyLen || got.Key != from.Key || from.KeyLen == 0 && got.Position != from.Position {
		return nil, fmt.Errorf("%w: %s: the answer is about another range", client.ErrProtocol, rc.name)
	}
	return b, nil
}

// lost returns a LostError if something may be missing in a result.
func lost(b nvme.KVRange) error {
	if !b.Lost() {
		return nil
	}
	return &LostError{From: b.From().Position, To: b.To().Position}
}

// entryOf is the Entry of a result.
func entryOf(e nvme.KVEntry, value bool) Entry {
	out := Entry{Key: e.Key(), Position: e.Position(), Tombstone: e.Tombstone(),
		Object: Object{Version: e.Version(), Size: e.ValueLen()}}
	if e.Expires() != 0 {
		out.Expires = time.Unix(int64(e.Expires()), 0)
	}
	if value {
		out.Value = e.Value()
	}
	return out
}

// Scan yields the objects and tombstones of a range in the order of their positions, without their values:
//
//	for e, err := range store.Scan(ctx, kv.All()) {
//		var lost *kv.LostError
//		if errors.As(err, &lost) {
//			log.Print(err) // and what comes behind it follows
//			continue
//		}
//		if err != nil {
//			return err
//		}
//		fmt.Printf("%q has version %d and %d bytes\n", e.Key, e.Version, e.Size)
//	}
//
// An error ends the sequence, unless it is a *LostError. To go on later, set Range.After to the last key.
func (n *Namespace) Scan(ctx context.Context, r Range) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		rc := rangeCommand{opcode: nvme.CmdKVScan, name: "Scan", kind: nvme.KVScan, bytes: rangeBytes}
		for b, err := range n.readRange(ctx, r, rc) {
			if err != nil {
				yield(Entry{}, err)
				return
			}
			for e := range b.Entries() {
				if !yield(entryOf(e, false), nil) {
					return
				}
			}
			if err := lost(b); err != nil && !yield(Entry{}, err) {
				return
			}
		}
	}
}

// Totals are what a Count has found.
type Totals struct {
	Objects, Tombstones uint64
	// Bytes are those of the objects' keys and values.
	Bytes uint64
}

// Count counts what is in a range, which has no After. If something may be missing, the error is a *LostError, the
// first one, and the totals are those of the rest.
func (n *Namespace) Count(ctx context.Context, r Range) (t Totals, err error) {
	rc := rangeCommand{opcode: nvme.CmdKVCount, name: "Count", kind: nvme.KVCount,
		bytes: nvme.KVRangeHeaderBytes + nvme.KVTotalsBytes}
	if err := r.withoutKey(rc.name); err != nil {
		return t, err
	}
	for b, e := range n.readRange(ctx, r, rc) {
		if e != nil {
			return t, e
		}
		t.Objects += b.Totals().Objects()
		t.Tombstones += b.Totals().Tombstones()
		t.Bytes += b.Totals().Bytes()
		if err == nil {
			err = lost(b)
		}
	}
	return t, err
}

// Sum is the digest of a sub-range. The same sub-ranges of two namespaces have the same objects, in the same versions
// and with the same identities of writes, if Count and Sum are the same.
type Sum struct {
	Range
	// Count is the number of objects and tombstones, and of keys of which only identities are left.
	Count, Sum uint64
}

// Digest returns the sums of sub-ranges of a range, which has no After. They are at most parts, which is 1 to 65,536,
// and at least half of that, unless the range has fewer positions or a command cannot transfer so many sums (MDTS). All
// have the same power of two of positions, but for the first and the last one, which end with the range. What expires
// until the time at is left out, so that two namespaces whose clocks differ are compared by the same time; zero: what
// has expired. If something may be missing, the error is a *LostError, the first one.
//
// To find the differences between two namespaces, compare their digests of All, then those of each sub-range whose sums
// differ, until they are so small that a Scan of both is cheaper.
func (n *Namespace) Digest(ctx context.Context, r Range, parts int, at time.Time) (sums []Sum, err error) {
	if parts < 1 || parts > nvme.KVMaxSums {
		return nil, fmt.Errorf("%w: Digest: parts is %d, must be 1 to %d", client.ErrInvalid, parts, nvme.KVMaxSums)
	}
	if err := r.withoutKey("Digest"); err != nil {
		return nil, err
	}
	most := (n.geo.Load().space.MaxTransfer - nvme.KVRangeHeaderBytes) / nvme.KVSumBytes
	shift := uint8(0)
	for r.Last>>shift-r.First>>shift >= uint64(min(parts, most)) {
		shift++
	}
	rc := rangeCommand{opcode: nvme.CmdKVDigest, name: "Digest", kind: nvme.KVDigest, shift: shift}
	if !at.IsZero() {
		if rc.time = uint32(at.Unix()); at.Unix() != int64(rc.time) {
			return nil, fmt.Errorf("%w: Digest: at is %s, must be %s to %s", client.ErrInvalid, at,
				time.Unix(0, 0).UTC(), time.Unix(math.MaxUint32, 0).UTC())
		}
	}
	sums = make([]Sum, int(r.Last>>shift-r.First>>shift)+1)
	for i := range sums {
		first := (r.First>>shift + uint64(i)) << shift
		sums[i].Range = Range{First: max(first, r.First), Last: min(first+(1<<shift-1), r.Last)}
	}
	rc.bytes = nvme.KVRangeHeaderBytes + len(sums)*nvme.KVSumBytes
	for b, e := range n.readRange(ctx, r, rc) {
		if e != nil {
			return nil, e
		}
		if b.Shift() != shift || int(b.First()>>shift-r.First>>shift)+b.Items() > len(sums) {
			return nil, fmt.Errorf("%w: Digest: the answer has other sub-ranges", client.ErrProtocol)
		}
		for i := range b.Items() {
			s := &sums[int(b.First()>>shift-r.First>>shift)+i]
			s.Count += b.Sum(i).Count()
			s.Sum += b.Sum(i).Sum()
		}
		if err == nil {
			err = lost(b)
		}
	}
	return sums, err
}

// Batch is a part of a range with all values and identities of writes, as CopyOut returns it. It has a checksum and may
// be kept in a file. It belongs to the caller.
type Batch []byte

// Check returns an error if a Batch that was kept somewhere is damaged.
func (b Batch) Check() error {
	r := nvme.KVRange(b)
	if err := r.Check(); err != nil {
		return err
	}
	if r.Kind() != nvme.KVCopy {
		return fmt.Errorf("a KV range of kind %d is not a Batch", r.Kind())
	}
	return nil
}

// Entries yields the objects and tombstones of a Batch that is not damaged, with their values.
func (b Batch) Entries() iter.Seq[Entry] {
	return func(yield func(Entry) bool) {
		if b.Check() != nil {
			return
		}
		for e := range nvme.KVRange(b).Entries() {
			if !e.Gone() && !yield(entryOf(e, true)) {
				return
			}
		}
	}
}

// Resume returns the range of what comes behind a Batch; ok is false if there is nothing.
func (b Batch) Resume() (r Range, ok bool) {
	k := nvme.KVRange(b)
	if k.Check() != nil || k.Complete() {
		return Range{}, false
	}
	to := k.To()
	if r = (Range{First: to.Position, Last: k.Last()}); to.KeyLen > 0 {
		r.After = to.Key[:to.KeyLen]
	}
	return r, true
}

// CopyOut yields a range in batches of up to 1 MiB, for CopyIn of another namespace. An error ends the sequence, unless
// it is a *LostError; a Batch comes with it, which has what is known of the part. A copy can go on later, from another
// process: see Batch.Resume.
//
//	for b, err := range from.CopyOut(ctx, kv.All()) {
//		if err != nil {
//			return err
//		}
//		if _, err := to.CopyIn(ctx, b, 0); err != nil {
//			return err
//		}
//	}
//
// Errors: ErrValueTooLarge if a value does not fit a command together with its headers.
func (n *Namespace) CopyOut(ctx context.Context, r Range) iter.Seq2[Batch, error] {
	return func(yield func(Batch, error) bool) {
		rc := rangeCommand{opcode: nvme.CmdKVCopyOut, name: "CopyOut", kind: nvme.KVCopy, bytes: copyBytes}
		for b, err := range n.readRange(ctx, r, rc) {
			if err != nil {
				yield(nil, err)
				return
			}
			if !yield(append(Batch(nil), b...), lost(b)) {
				return
			}
		}
	}
}

// CopyIn stores the objects and tombstones of a Batch, each if its version is greater than that of what the key has, or
// had when it was deleted with a tombstone, or if the key has the same version but its value cannot be read. So batches
// may be repeated, come in any order, and be mixed with other writes: the highest version wins. Identities of writes
// are added to those of the key. It returns how many entries have changed something.
//
// With a clock, the part of the range that the Batch is about becomes what the Batch says: what is there and has a
// version of at most the clock ceases to exist if the Batch does not have it. Every write with a version of at most the
// clock must have been in the namespace that the Batch comes from before its CopyOut began: docs/ranges.md has the
// rules.
//
// Errors: ErrCapacityExceeded. Some entries may have been stored then. It may be repeated. ErrSuperseded if
// DropRange has dropped some of it and the target is still clearing the range: nothing has changed, and it may be
// repeated later.
func (n *Namespace) CopyIn(ctx context.Context, b Batch, clock uint64) (changed int, err error) {
	const name = "CopyIn"
	s := &n.geo.Load().space
	switch err := b.Check(); {
	case !s.Extended:
		return 0, fmt.Errorf("%w: CopyIn needs extended key-value", client.ErrUnsupported)
	case err != nil:
		return 0, fmt.Errorf("%w: CopyIn: %w", client.ErrInvalid, err)
	case len(b) > s.MaxTransfer:
		return 0, fmt.Errorf("%w: CopyIn of %d bytes: one command transfers %d (MDTS)", ErrValueTooLarge, len(b),
			s.MaxTransfer)
	case clock > nvme.MaxKVClock:
		return 0, badClock(name, clock)
	}
	cmd := client.Command{Data: b}
	cmd.SQE.SetOpcode(nvme.CmdKVCopyIn)
	cmd.SQE.SetNSID(n.nsid)
	cmd.SQE.KVRange().SetLenBytes(uint32(len(b)))
	cmd.SQE.KVRange().SetClock(clock)
	comp, err := n.c.Do(ctx, name, true, &cmd)
	if err == nil {
		err = host.CheckStatus(name, comp.Status)
	}
	if err != nil {
		return 0, err
	}
	return int(uint32(comp.Result)), nil
}

// badClock is the error for a clock that is too great.
func badClock(command string, clock uint64) error {
	return fmt.Errorf("%w: %s: clock is %d, must be at most %d", client.ErrInvalid, command, clock,
		uint64(nvme.MaxKVClock))
}

// DropRange makes everything in a range, which has no After, cease to exist that has a version of at most a clock, at
// once, however much it is, and returns the clock. Clock 0 is that of the target when the command comes. Then the
// command is not repeated after a loss of the connection, because it would drop what was stored meanwhile. Other clocks
// are at most 2^62-1, or the greatest version that the target has given.
//
// Errors: a *client.StatusError with Internal Error, without DNR, if the namespace has 64 Drops whose space is still
// being reclaimed: nothing has changed, and it may be repeated later; with Write Fault if the target could not write
// it: it may take effect later. client.ErrIndeterminate, without a clock, after a loss of the connection.
func (n *Namespace) DropRange(ctx context.Context, r Range, clock uint64) (uint64, error) {
	const name = "DropRange"
	switch err := r.withoutKey(name); {
	case !n.geo.Load().space.Extended:
		return 0, fmt.Errorf("%w: DropRange needs extended key-value", client.ErrUnsupported)
	case err != nil:
		return 0, err
	case clock > nvme.MaxKVClock:
		return 0, badClock(name, clock)
	}
	var cmd client.Command
	cmd.SQE.SetOpcode(nvme.CmdKVDrop)
	cmd.SQE.SetNSID(n.nsid)
	q := cmd.SQE.KVRange()
	q.SetFirst(r.First)
	q.SetLast(r.Last)
	q.SetClock(clock)
	comp, err := n.c.Do(ctx, name, clock != 0, &cmd)
	if err == nil {
		err = host.CheckStatus(name, comp.Status)
	}
	if err != nil {
		return 0, err
	}
	return comp.Result, nil
}
