package format

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// modelKey is what a segment says about a key.
type modelKey struct {
	key           string
	version       uint64
	pieces        []int
	gone, expires bool
	expiry        uint32
	evicted       bool
	identities    []Identity
}

// answer removes the identities of a client with a lower Seq than answered, but not the oldest of the key if others
// were evicted.
func (k *modelKey) answer(client, answered uint64) {
	var left []Identity
	for i, o := range k.identities {
		if o.Client != client || o.Seq >= answered || i == 0 && k.evicted {
			left = append(left, o)
		}
	}
	k.identities = left
}

// content returns what a segment says, in order.
func content(b Segment) (all []modelKey) {
	for at := b.First(); at < b.LengthBytes(); {
		it := b.Item(at)
		at += it.LengthBytes()
		switch last := len(all) - 1; {
		case it.HasKey():
			all = append(all, modelKey{key: string(it.Key()), version: it.Version(), pieces: []int{it.ValueLen()},
				gone: it.Gone(), expires: it.HasExpiry(), expiry: it.Expiry(), evicted: it.Evicted()})
		case it.Continues():
			all[last].pieces = append(all[last].pieces, it.ValueLen())
		default:
			all[last].identities = append(all[last].identities, it.Identity())
		}
	}
	return all
}

// TestEditsAgainstAModel makes random edits of segments and of a list of what they should say.
func TestEditsAgainstAModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	widths, drops, evictions, ends := map[int]int{}, 0, 0, 0
	for range 300 {
		b := make(Segment, 1<<16)
		b.Clear(42)
		lossy, clock := rng.IntN(2) == 0, uint64(0)
		b.SetLossy(lossy)
		var model []modelKey
		steps, keys := 60, 10
		if rng.IntN(10) == 0 { // so many identities that some are evicted
			steps, keys = 600, 2
		}
		for step := range steps {
			i := rng.IntN(keys)
			key := strings.Repeat(fmt.Sprint(i), 1+i)
			at := b.Find([]byte(key))
			m := slices.IndexFunc(model, func(k modelKey) bool { return k.key == key })
			if (at == 0) != (m < 0) {
				t.Fatalf("key %s is at %d, in the model at %d", key, at, m)
			}
			if at == 0 || rng.IntN(4) == 0 { // it gets a new version
				clock += 1 + rng.Uint64()>>(30+rng.IntN(34))
				b.Recode(clock, max(b.Width(), b.WidthFor(clock, clock)))
				if at = b.Find([]byte(key)); at == 0 {
					at, m = b.Insert([]byte(key)), len(model)
					model = append(model, modelKey{key: key, pieces: []int{0}})
				}
				b.Item(at).SetVersion(clock)
				model[m].version = clock
			}
			k := &model[m]
			switch rng.IntN(8) {
			case 0:
				if keys == 2 && rng.IntN(50) > 0 {
					break
				}
				b.Remove(at)
				model = slices.Delete(model, m, m+1)
			case 1:
				n := rng.IntN(3)
				b.Truncate(at)
				b.Extend(at, n)
				k.pieces, k.gone = nil, false
				for j := range n + 1 {
					it := b.Item(at + j*ItemHeaderBytes)
					if j > 0 {
						it = b.Item(at + b.Item(at).LengthBytes() + (j-1)*ItemHeaderBytes)
					}
					it.SetValueLen(j + 1)
					it.SetValueOffset(8)
					k.pieces = append(k.pieces, j+1)
				}
			case 2:
				b.Truncate(at)
				b.Item(at).SetGone()
				k.gone, k.pieces = true, []int{0}
			case 3:
				k.expires, k.expiry = rng.IntN(2) == 0, 0
				if k.expires {
					k.expiry = rng.Uint32N(100)
				}
				b.SetExpiry(at, k.expires, k.expiry)
			case 4, 5:
				id := Identity{Client: rng.Uint64N(3), Seq: rng.Uint64(), Outcome: 3, Version: rng.Uint64(),
					KeepUntil: rng.Uint32N(50)}
				if keys == 2 && rng.IntN(200) > 0 {
					id.KeepUntil = 10 + uint32(step)/6 + rng.Uint32N(3)
				}
				answered := uint64(0)
				if rng.IntN(30) == 0 {
					answered = rng.Uint64N(id.Seq)
				}
				before := slices.Clone(k.identities)
				k.answer(id.Client, answered)
				if n := b.Answered(at, id.Client, answered); n != len(before)-len(k.identities) {
					t.Fatalf("%d identities are answered, want %d", n, len(before)-len(k.identities))
				}
				drops += len(before) - len(k.identities)
				if ids := DropAnswered(before, id.Client, answered, k.evicted); !slices.Equal(ids, k.identities) {
					t.Fatalf("of a slice %v are left, want %v", ids, k.identities)
				}
				b.AddIdentity(at, &id, answered)
				if k.identities = append(k.identities, id); len(k.identities) > MaxIdentities {
					was, next := k.identities[0].KeepUntil, &k.identities[1].KeepUntil
					if was == 0 || *next != 0 && *next < was {
						*next = was
					}
					k.evicted, k.identities = true, k.identities[1:]
					evictions++
				}
			case 6:
				now := rng.Uint32N(50)
				if keys == 2 {
					now = rng.Uint32N(2)
				}
				if k.evicted && rng.IntN(3) == 0 {
					now = k.identities[0].KeepUntil
				}
				over := func(id Identity) bool { return id.KeepUntil != 0 && id.KeepUntil <= now }
				if k.evicted && over(k.identities[0]) { // it was to be kept as long as those that were evicted
					k.evicted = false
					ends++
				}
				if b.Evicted(at, now) != k.evicted {
					t.Fatalf("identities of %s were evicted: %v, want %v", key, !k.evicted, k.evicted)
				}
				b.DropIdentities(at, now)
				k.identities = slices.DeleteFunc(k.identities, over)
			case 7:
				if w := b.Width(); w >= 2 {
					b.Recode(clock, min(8, w+rng.IntN(2)))
					at = b.Find([]byte(key)) // the items before it may have become longer
				}
				if b.Settle(at) {
					if lossy || !k.gone || k.expires || len(k.identities) > 0 {
						t.Fatalf("%+v was removed", *k)
					}
					model = slices.Delete(model, m, m+1)
				}
			}
			b.SetVersion(7)
			copy(b[b.LengthBytes():], b.SetChanges(BeginChanges(nil, 0, 0)))
			b.Seal(77)
			if err := b.Check(77); err != nil {
				t.Fatal(err)
			}
			widths[b.Width()]++
			if got := content(b); fmt.Sprint(got) != fmt.Sprint(model) {
				t.Fatalf("the segment says\n%+v, want\n%+v", got, model)
			}
			now := rng.Uint32N(100)
			due := func(unix uint32) bool { return unix != 0 && unix <= now }
			may := slices.ContainsFunc(model, func(k modelKey) bool {
				return k.gone && !k.expires || k.expires && due(k.expiry) ||
					slices.ContainsFunc(k.identities, func(id Identity) bool { return due(id.KeepUntil) })
			})
			if b.MayDrop(now) != may {
				t.Fatalf("something may be dropped at %d: %v, want %v: %+v", now, !may, may, model)
			}
			for _, k := range model {
				at := b.Find([]byte(k.key))
				if b.Identities(at) != len(k.identities) || b.KeyOf(at+b.Item(at).LengthBytes()-1) != at {
					t.Fatalf("%d identities of %s, want %d", b.Identities(at), k.key, len(k.identities))
				}
				for _, id := range k.identities {
					if got, ok := b.FindIdentity(at, id.Client, id.Seq); !ok || got != id {
						t.Fatalf("identity %+v, want %+v", got, id)
					}
				}
				if _, ok := b.FindIdentity(at, 1, 2); ok {
					t.Fatal("an identity that was not added")
				}
			}
		}
		b.Complete()
		model = slices.DeleteFunc(model, func(k modelKey) bool {
			return k.gone && !k.expires && len(k.identities) == 0
		})
		c := make(Segment, 1<<16)
		c.Clear(43)
		c.CopyItems(b)
		if got := content(c); fmt.Sprint(got) != fmt.Sprint(model) || c.Lossy() || c.Clock() != clock {
			t.Fatalf("the complete segment says\n%+v, want\n%+v", got, model)
		}
	}
	if drops == 0 || evictions == 0 || ends == 0 {
		t.Errorf("%d identities were answered and dropped, %d evicted, %d times until all of a key would have ended",
			drops, evictions, ends)
	}
	for w := range 9 {
		if w != 1 && widths[w] == 0 {
			t.Errorf("no segment had a version width of %d: %v", w, widths)
		}
	}
}

func TestAVersionIsTheGreatestUpToTheClockWithItsLowBytes(t *testing.T) {
	for _, c := range []struct {
		clock, oldest uint64
		width         int
	}{
		{1, 1, 0}, {7, 7, 0}, {8, 7, 2}, {1 << 16, 1, 2}, {1<<16 + 1, 1, 3}, {1 << 24, 1, 3}, {1<<24 + 1, 1, 4},
		{1 << 40, 1, 5}, {1<<40 + 1, 1, 6}, {1 << 56, 1, 7}, {1<<56 + 1, 1, 8}, {1<<64 - 1, 1, 8},
		{1<<64 - 1, 1<<64 - 2, 2},
	} {
		if got := versionWidth(c.clock, c.oldest); got != c.width {
			t.Errorf("from %d to %d: width %d, want %d", c.oldest, c.clock, got, c.width)
		}
		b := make(Segment, 256)
		b.Clear(0)
		b.Recode(c.clock, c.width)
		for _, v := range []uint64{c.oldest, c.clock, c.oldest + (c.clock-c.oldest)/3} {
			it := b.Item(b.Insert([]byte("k")))
			if it.SetVersion(v); c.width > 0 && it.Version() != v || c.width == 0 && it.Version() != c.clock {
				t.Errorf("clock %d, width %d: version is %d, want %d", c.clock, c.width, it.Version(), v)
			}
			b.Clear(0)
			b.Recode(c.clock, c.width)
		}
	}
}

func TestAnOldSegmentIsUpgraded(t *testing.T) {
	b := append(Segment(oldSegment()), make([]byte, UpgradeBytes)...)
	was := content(b)
	if b.Clock() != 1 || b.Width() != 0 || b.Item(b.First()).RecordBytes() != 32<<10+24 {
		t.Errorf("clock %d, width %d, a record of %d bytes", b.Clock(), b.Width(), b.Item(b.First()).RecordBytes())
	}
	b.Upgrade()
	b.SetVersion(8)
	b.Seal(77)
	if err := b.Check(77); err != nil {
		t.Error(err)
	}
	if got := content(b); fmt.Sprint(got) != fmt.Sprint(was) || b.Old() || got[0].version != 1 {
		t.Errorf("it says %+v, want %+v", got, was)
	}
	at := b.First()
	if got := b.Item(at).RecordBytes(); got != 32<<10+24 {
		t.Errorf("the record of an old value has %d bytes", got)
	}
	b.Item(at).SetValueOffset(16)
	if got := b.Item(at).RecordBytes(); got != 32<<10+16 {
		t.Errorf("the record of a new value has %d bytes", got)
	}
	// The longest segment can be upgraded.
	long := make(Segment, 1<<16)
	copy(long, oldSegment()[:24])
	long.SetLengthBytes(MaxSegmentBytes &^ 7)
	long.SetItems(0)
	for at := 24; at+25 <= long.LengthBytes(); at += 25 {
		long[at] = 16
		long.SetItems(long.Items() + 1)
		if rest := long.LengthBytes() - at - 25; rest < 25 {
			long.SetLengthBytes(at + 25)
		}
	}
	long.Upgrade()
	copy(long[long.LengthBytes():], long.SetChanges([]byte{1}))
	long.Seal(77)
	if err := long.Check(77); err != nil || long.ExtentBytes() > 1<<16 {
		t.Errorf("%v, %d bytes", err, long.ExtentBytes())
	}
}

// The last 8 bytes of a key are compared first. They alone say nothing.
func TestKeysThatEndAlikeAreToldApart(t *testing.T) {
	b := Segment(make([]byte, 4096))
	b.Clear(7)
	b.Recode(9, 2)
	want := map[string]int{}
	for _, key := range []string{"0000000112345678", "1000000012345678", "0012345678", "012345678", "12345678",
		"2345678"} {
		want[key] = b.Insert([]byte(key))
	}
	b.Seal(77)
	for _, key := range []string{"2000000012345678", "0000000012345678", "1012345678", "212345678", "345678"} {
		want[key] = 0
	}
	for key, at := range want {
		got, err := b.CheckFor(77, []byte(key))
		if found := b.Find([]byte(key)); found != at || got != at || err != nil {
			t.Errorf("%s is found at %d, and at %d (%v), want %d", key, found, got, err, at)
		}
	}
}

// TestAnIdentityHasNoValue: what lies in an identity where other items have the length of their value is not one.
func TestAnIdentityHasNoValue(t *testing.T) {
	b := make(Segment, KeyUnit*4)
	b.Clear(1)
	at := b.Insert([]byte("a"))
	b.AddIdentity(at, &Identity{Client: 1<<64 - 1, Seq: 1}, 0)
	off := at + b.Item(at).LengthBytes()
	if n, length := b.Pieces(off); !b.Item(off).IsIdentity() || n != 1 || length != 0 {
		t.Errorf("%d pieces, %d bytes, want 1 and 0", n, length)
	}
	if at, number := b.FindValue(1<<43-8), b.NumberOf(1<<43-8); at != 0 || number != -1 {
		t.Errorf("an identity counts as the value of item %d at %d", number, at)
	}
}
