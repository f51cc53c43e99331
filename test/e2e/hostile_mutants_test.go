package e2e

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// TestAMillionMutatedPDUs: mutated PDUs do not harm the daemon, and a well-behaved host sees no error and no
// considerable delay. Golden frames are mutated by a bit, a byte, a field or a length, truncated, duplicated, swapped
// and cut. The connections are in every phase: before ICReq, before Connect, admin queue and I/O queue, with and
// without digests.
func TestAMillionMutatedPDUs(t *testing.T) {
	rng := random(t)
	s := oneMem
	s.ssds = "  - {name: ssd0, backend: mem, size: 256MiB}\n"
	s.subsystems += hostileSubsystem
	s.limits = "stall_timeout: 1s" // and time for the handshakes of the attackers, which a busy machine delays
	d := start(t, s)
	d.laneBytes = 4 * 128 << 10 // Compare and Verify are among the mutants
	good := startVictim(t, d, d.options(hostA, nqnA), 2)
	good.progress(2000)
	calm := good.p99()

	total := int64(mutants)
	if raceEnabled {
		total /= 2
	}
	began := time.Now()
	var sent, closed atomic.Int64
	var wg sync.WaitGroup
	for w := range 3 {
		luck := rand.New(rand.NewPCG(rng.Uint64(), uint64(w)))
		wg.Go(func() {
			for sent.Load() < total && !t.Failed() {
				n, ended := attack(d, luck, w)
				sent.Add(int64(n))
				if ended {
					closed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(began)
	busy := good.p99()
	good.progress(100)
	good.stop()
	t.Logf("%d mutated PDUs in %v; the daemon closed %d connections; the other host's p99 %v, before %v", sent.Load(),
		took, closed.Load(), busy, calm)
	if limit := 100*time.Millisecond + 20*calm; busy > limit {
		t.Errorf("the other host's p99 is %v, before the attack it was %v", busy, calm)
	}
	if closed.Load() < 100 {
		t.Errorf("only %d connections were closed by the daemon: the mutants are too tame", closed.Load())
	}
	if n := d.metric("jbof_protocol_errors_total"); n < float64(closed.Load())/4 {
		t.Errorf("%v protocol errors are counted, %d connections were closed", n, closed.Load())
	}
	// 5 lines a second for each of a dozen kinds of message.
	if lines, limit := strings.Count(d.log.String(), "\n"), int(took.Seconds()+2)*5*12+50; lines > limit {
		t.Errorf("%d lines in the log after %v, want at most %d", lines, took, limit)
	}
	if d.metric("jbof_log_messages_dropped_total") == 0 {
		t.Error("no log messages were suppressed")
	}
}

// attack opens a connection in some phase, sends a stream of mutants, and returns how many of them the daemon received
// before it closed the connection, if it did. It does not count mutants that the daemon cannot have read.
func attack(d *daemon, rng *rand.Rand, worker int) (n int, closed bool) {
	me := login{host: fmt.Sprintf("%s-%d", hostB, worker), sub: nqnHostile}
	var f pdu.Format
	if rng.IntN(4) == 0 {
		f = pdu.Format{HeaderDigest: true, DataDigest: true}
	}
	ic := icreq()
	if f.HeaderDigest {
		ic.SetDGST(3)
	}
	connect := connectCapsule(f, me)
	phase := rng.IntN(12)
	switch phase {
	case 0: // before ICReq
		return shoot(d, nil, func(int) []byte { return mutateHard(rng, ic[:]) }, 1+rng.IntN(3))
	case 1: // before Connect
		return shoot(d, ic[:], func(int) []byte { return mutateHard(rng, connect) }, 1+rng.IntN(3))
	}
	cc := capsule(f, propertySet(nvme.PropCC, enable, 1), nil, 0)
	if phase < 6 { // admin queue
		frames := adminFrames(f)
		return shootAfter(d, stream(rng, f, frames), 200, ic[:], connect, cc)
	}
	// An I/O queue needs an association.
	if rng.IntN(20) == 0 { // a command immediately after Connect ends the connection
		return shoot(d, slices.Concat(ic[:], connect), func(int) []byte { return cc }, 1)
	}
	admin, err := dialRaw(d.t, d.addr)
	if err != nil {
		d.t.Error(err)
		return 0, false
	}
	defer admin.close()
	p, err := exchange(admin, ic[:], connect)
	if err != nil {
		d.t.Errorf("Connect: %v", err)
		return 0, false
	}
	me.cntlid, me.qid, me.entries = p.ConnectCNTLID(), 1, 64
	if _, err := exchange(admin, cc); err != nil {
		d.t.Errorf("enabling: %v", err)
		return 0, false
	}
	return shootAfter(d, stream(rng, f, ioFrames(f)), 200, ic[:], connectCapsule(f, me))
}

// exchange sends PDUs, each after the answer to the previous one, and returns the last completion, which must be
// successful.
func exchange(h *rawHost, pdus ...[]byte) (last nvme.CQE, err error) {
	for _, p := range pdus {
		h.send(p)
		q, err := h.next()
		if err != nil {
			return last, err
		}
		if (*pdu.Common)(q).Type() == pdu.TypeCapsuleResp {
			if last = *(*pdu.CapsuleResp)(q).CQE(); !last.Status().OK() {
				return last, fmt.Errorf("status %v", last.Status())
			}
		}
	}
	return last, nil
}

// adminFrames and ioFrames are the golden frames of the mutants.
func adminFrames(f pdu.Format) (all [][]byte) {
	for i, op := range []uint8{nvme.AdminKeepAlive, nvme.AdminIdentify, nvme.AdminGetLogPage, nvme.AdminGetFeatures,
		nvme.AdminSetFeatures, nvme.AdminAbort, nvme.AdminAsyncEvent} {
		var e nvme.SQE
		e.SetOpcode(op)
		e.SetCID(uint16(i + 10))
		n := 0
		switch op {
		case nvme.AdminIdentify:
			e.Identify().SetCNS(nvme.CNSController)
			n = 4096
		case nvme.AdminGetLogPage:
			e.GetLog().SetLID(nvme.LIDSMART)
			e.GetLog().SetLenBytes(512)
			e.SetNSID(nvme.NSIDBroadcast)
			n = 512
		case nvme.AdminGetFeatures, nvme.AdminSetFeatures:
			e.Features().SetFID(nvme.FIDNumberOfQueues)
		}
		all = append(all, capsule(f, e, nil, n))
	}
	var get nvme.SQE
	get.Property().Init(nvme.FabricsPropertyGet, nvme.PropCSTS)
	return append(all, capsule(f, get, nil, 0))
}

func ioFrames(f pdu.Format) (all [][]byte) {
	all = append(all,
		capsule(f, rw(nvme.CmdRead, 1, 8, 8), nil, 4096),
		capsule(f, rw(nvme.CmdRead, 2, 100, 1), nil, 512),
		capsule(f, rw(nvme.CmdWrite, 3, 8, 8), make([]byte, 4096), 0),
		capsule(f, rw(nvme.CmdWrite, 4, 64, 1), make([]byte, 512), 0),
		capsule(f, rw(nvme.CmdFlush, 5, 0, 1), nil, 0),
		capsule(f, rw(nvme.CmdWriteZeroes, 6, 9, 3), nil, 0),
		capsule(f, rw(nvme.CmdCompare, 7, 9, 1), make([]byte, 512), 0),
		capsule(f, rw(nvme.CmdVerify, 8, 9, 9), nil, 0),
		frame(f, pdu.TypeH2CData, pdu.FlagLast, h2cData(3, 0, 0, 512), make([]byte, 512)))
	var dsm nvme.SQE
	dsm.SetOpcode(nvme.CmdDSM)
	dsm.SetNSID(1)
	dsm.SetCID(9)
	dsm.SetDSMRanges(1)
	dsm.SetCDW(11, nvme.DSMDeallocate)
	r := make([]byte, 16)
	binary.LittleEndian.PutUint32(r[4:], 8)
	return append(all, capsule(f, dsm, r, 0))
}

// stream makes mutants of the frames. Most mutants are invalid after the common header, so a command fails and the
// connection stays. One in 40 is invalid anywhere.
func stream(rng *rand.Rand, f pdu.Format, frames [][]byte) func(int) []byte {
	return func(i int) []byte {
		k := rng.IntN(len(frames))
		if frames[k][0] == byte(pdu.TypeH2CData) && rng.IntN(20) > 0 {
			k = 0 // the connection hardly ever survives this
		}
		if rng.IntN(40) == 0 {
			return mutateHard(rng, frames[k])
		}
		p := bytes.Clone(frames[k])
		for range 1 + rng.IntN(3) {
			at := pdu.CommonLen + rng.IntN(nvme.SQESize)
			if rng.IntN(2) == 0 {
				p[at] ^= 1 << rng.IntN(8)
			} else {
				p[at] = interesting[rng.IntN(len(interesting))]
			}
		}
		// CIDs differ, otherwise the connection rarely survives
		binary.LittleEndian.PutUint16(p[pdu.CommonLen+2:], uint16(i))
		if f.HeaderDigest {
			pdu.PutDigest(p[pdu.CapsuleCmdLen:], pdu.Digest(p[:pdu.CapsuleCmdLen]))
		}
		return p
	}
}

var interesting = []byte{0, 1, 2, 3, 0x7f, 0x80, 0xfe, 0xff, 0x10, 0x40, 0x5a}

// mutateHard changes a frame anywhere, in every way.
func mutateHard(rng *rand.Rand, p []byte) []byte {
	p = bytes.Clone(p)
	for range 1 + rng.IntN(2) {
		switch rng.IntN(8) {
		case 0:
			p[rng.IntN(len(p))] ^= 1 << rng.IntN(8)
		case 1:
			p[rng.IntN(min(len(p), pdu.CommonLen))] = interesting[rng.IntN(len(interesting))]
		case 2:
			p[rng.IntN(min(len(p), 80))] = byte(rng.Uint32())
		case 3: // truncated
			p = p[:1+rng.IntN(len(p))]
		case 4: // oversized
			if len(p) >= pdu.CommonLen {
				binary.LittleEndian.PutUint32(p[4:], rng.Uint32()>>rng.IntN(30))
			}
		case 5: // doubled, or with something behind
			p = append(p, p[:rng.IntN(len(p))+1]...)
		case 6: // duplicated, or followed by other data
			k := rng.IntN(len(p))
			p = append(bytes.Clone(p[k:]), p[:k]...)
		case 7: // noise
			for i := range min(len(p), 1+rng.IntN(64)) {
				p[i] = byte(rng.Uint32())
			}
		}
	}
	return p
}

// shootAfter is shoot with a prologue whose answers it awaits.
func shootAfter(d *daemon, next func(i int) []byte, count int, prologue ...[]byte) (n int, closed bool) {
	h, err := dialRaw(d.t, d.addr)
	if err != nil {
		d.t.Error(err)
		return 0, false
	}
	defer h.close()
	if _, err := exchange(h, prologue...); err != nil {
		d.t.Errorf("the prologue: %v", err)
		return 0, false
	}
	return h.shoot(next, count)
}

// shoot sends a prologue and then count mutants in batches, until the daemon closes the connection. Batches are small,
// and each waits for the answers to the previous one, so that the daemon reads almost everything that is sent.
func shoot(d *daemon, prologue []byte, next func(i int) []byte, count int) (n int, closed bool) {
	h, err := dialRaw(d.t, d.addr)
	if err != nil {
		d.t.Error(err)
		return 0, false
	}
	defer h.close()
	h.send(prologue)
	return h.shoot(next, count)
}

func (h *rawHost) shoot(next func(i int) []byte, count int) (n int, closed bool) {
	const batch = 25
	for n < count {
		var out []byte
		for range min(batch, count-n) {
			out = append(out, next(n)...)
			n++
		}
		_ = h.c.SetWriteDeadline(time.Now().Add(wait))
		if _, err := h.c.Write(out); err != nil {
			return n, true
		}
		// Any reply is valid: answers, a TermReq or the end. After some mutants the daemon waits for more data.
		_ = h.c.SetReadDeadline(time.Now().Add(2 * time.Millisecond))
		for {
			k, err := h.c.Read(h.in[:])
			if isTimeout(err) {
				break
			}
			if err != nil {
				return n, true
			}
			if k < len(h.in)/8 {
				break
			}
		}
	}
	return n, false
}
