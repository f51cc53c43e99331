// Package qpairtest has what the tests of the transports' state machines have in common: namespaces, test data, and a
// qpair.Handler that records its calls. It does not know any transport. The tests of internal/nvmeof/tcp and
// internal/nvmeof/rdma use it.
package qpairtest

import (
	"fmt"
	"hash/crc32"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/qpair"
	"jbofd/internal/units"
)

// HostNQN is the host that the namespaces of Table are for.
const HostNQN = "nqn.2014-08.org.nvmexpress:uuid:aaaaaaaa-0000-0000-0000-000000000001"

// Limits are small, so that transcripts can reach them.
var Limits = nvmeof.Limits{MDTSBytes: 64 << 10, FusedBytes: 4096}

// Table has namespaces 1 (512 bytes) and 2 (4096), and 4 of keys and values of up to 16 KiB.
func Table() *nvmeof.NamespaceTable {
	ns := func(nsid uint32, shift uint8) *nvmeof.Namespace {
		return &nvmeof.Namespace{NSID: nsid, OffsetBytes: units.DriveOffset(nsid) << 20, SizeBytes: 1 << 20,
			BlockShift: shift, ANAGroup: 1, ANAState: nvme.ANAStateOptimized}
	}
	kv := ns(4, 0)
	kv.CSI, kv.MaxValueBytes = nvme.CSIKV, 16<<10
	return nvmeof.NewNamespaceTable([]*nvmeof.Namespace{ns(1, 9), ns(2, 12), kv}, HostNQN)
}

// IOQueue is an attachment as an I/O queue with the namespaces of Table.
func IOQueue(entries int, noFlow bool) qpair.Attachment {
	return qpair.Attachment{QID: 1, Entries: entries, NoSQFlow: noFlow, Table: Table()}
}

// ConnectData is the data of HostNQN's Connect.
func ConnectData() (d nvme.ConnectData) {
	d.SetHostNQN(HostNQN)
	d.SetSubNQN("nqn.2026-11.example.jbofd:t")
	return d
}

// Opcodes are those of the commands in transcripts, by name.
var Opcodes = map[string]uint8{"read": nvme.CmdRead, "write": nvme.CmdWrite, "compare": nvme.CmdCompare,
	"flush": nvme.CmdFlush, "zeroes": nvme.CmdWriteZeroes, "dsm": nvme.CmdDSM, "verify": nvme.CmdVerify,
	"uncorrectable": nvme.CmdWriteUncorr, "identify": nvme.AdminIdentify, "log": nvme.AdminGetLogPage,
	"keepalive": nvme.AdminKeepAlive, "aer": nvme.AdminAsyncEvent, "security-send": 0x81,
	"timestamp": nvme.AdminSetFeatures}

// Statuses are those of the answers in transcripts, by name.
var Statuses = map[string]nvme.Status{"success": nvme.Success, "internal": nvme.InternalError | nvme.DNR,
	"media": nvme.UnrecoveredReadError | nvme.DNR, "aborted": nvme.AbortRequested,
	"transport": nvme.TransientTransportError}

// Sum is a short checksum of bytes, for transcripts.
func Sum(b []byte) string {
	return fmt.Sprintf("%d:%08x", len(b), crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// Pattern returns n bytes of test data for a seed.
func Pattern(seed, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + seed)
	}
	return b
}
