package replicated_test

import (
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
)

// port receives completed commands, whose data comes in their capsules.
type port struct{ done chan *executor.Command }

func (p *port) Done(c *executor.Command) bool {
	p.done <- c
	return false
}

func (p *port) NeedData(*executor.Command) bool { panic("the data comes in the capsule") }

func (p *port) Kick()    {}
func (p *port) Deliver() {}

// TestExtendedCommandsReturnVersions: those of writes, and with a condition that does not hold that of the object.
// Plain commands return none.
func TestExtendedCommandsReturnVersions(t *testing.T) {
	s, ns := newSubject(t)
	account := s.Pool.Account("tenant")
	defer account.Close()
	p := &port{done: make(chan *executor.Command, 1)}
	batch := s.Executor.NewBatch()
	run := func(opcode, options uint8, length int, header func(h *nvme.KVWriteHeader)) *executor.Command {
		t.Helper()
		c := &executor.Command{SQE: new(nvme.SQE), Plan: new(nvmeof.Plan), Port: p}
		c.Payer = executor.Payer{Account: account, Tenant: 1}
		c.SQE.SetOpcode(opcode)
		c.SQE.SetNSID(1)
		c.SQE.SetPSDT(nvme.PSDTSGL)
		c.SQE.KV().SetKey([]byte("key"))
		c.SQE.KV().SetOptions(options)
		c.SQE.KV().SetLenBytes(uint32(length))
		*c.Plan = nvmeof.Plan{Kind: nvmeof.KindReplica, Namespace: ns, ToController: uint32(length),
			Wide: nvme.KVVersioned(opcode), MissingOK: opcode != nvme.CmdKVStore && opcode != nvme.CmdKVXStore}
		c.Context = s.Executor.NewContext(c)
		if c.Plan.ToController > 0 {
			c.Buf, _ = s.Pool.Get(account, length)
			clear(c.Buf.B)
			if header != nil {
				header((*nvme.KVWriteHeader)(c.Buf.B))
			}
		}
		batch.Begin(c)
		batch.Submit()
		select {
		case <-p.done:
		case <-time.After(30 * time.Second):
			t.Fatal("a command does not end")
		}
		if !c.Buf.IsZero() {
			s.Pool.Put(c.Buf)
		}
		return c
	}
	want := func(what string, c *executor.Command, st nvme.Status, result uint64) {
		t.Helper()
		if c.Status.Code() != st || c.Result != result {
			t.Errorf("%s: %v, result %#x; want %v, %#x", what, c.Status, c.Result, st, result)
		}
	}
	const value = nvme.KVWriteHeaderSize + 10
	first := run(nvme.CmdKVXStore, 0, value, nil)
	if !first.Status.OK() || first.Result == 0 {
		t.Fatalf("an extended Store: %v, result %d", first.Status, first.Result)
	}
	want("if absent", run(nvme.CmdKVXStore, 0, value, func(h *nvme.KVWriteHeader) { h.SetCondition(nvme.KVIfAbsent) }),
		nvme.KeyExists, first.Result)
	want("another version", run(nvme.CmdKVXStore, 0, value, func(h *nvme.KVWriteHeader) {
		h.SetCondition(nvme.KVIfVersion)
		h.SetVersion(first.Result + 1)
	}), nvme.KVVersionMismatch, first.Result)
	want("a plain Store if absent", run(nvme.CmdKVStore, nvme.KVStoreMustNotExist, 10, nil), nvme.KeyExists, 0)
	want("a plain Store", run(nvme.CmdKVStore, 0, 10, nil), nvme.Success, 0)
	second := run(nvme.CmdKVXDelete, 0, nvme.KVWriteHeaderSize, nil)
	if !second.Status.OK() || second.Result <= first.Result {
		t.Errorf("an extended Delete: %v, result %#x behind %#x", second.Status, second.Result, first.Result)
	}
	want("a plain Delete of nothing", run(nvme.CmdKVDelete, 0, 0, nil), nvme.Success, 0)
	want("a newer version", run(nvme.CmdKVXStore, 0, value, func(h *nvme.KVWriteHeader) {
		h.SetCondition(nvme.KVIfNewer)
		h.SetVersion(1 << 61)
	}), nvme.InvalidField, 0)
}
