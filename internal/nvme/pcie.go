package nvme

import "encoding/binary"

// Offsets of the controller properties that only PCIe has, in BAR 0 (NVMe Base 2.0, section 3.1.3; NVMe over PCIe
// Transport 1.0, section 3.1).
const (
	PropINTMS  = 0x0C
	PropINTMC  = 0x10
	PropAQA    = 0x24 // sizes of the admin queues, 0-based: 27:16 completion, 11:0 submission
	PropASQ    = 0x28 // address of the admin submission queue, 8 bytes
	PropACQ    = 0x30 // address of the admin completion queue, 8 bytes
	PropCMBLOC = 0x38
	PropCMBSZ  = 0x3C
	PropPMRCAP = 0xE00
	// PropDoorbells is where the doorbells begin: that of submission queue y at 2y, that of its completion queue at
	// 2y + 1, in units of 4 << CAP.DSTRD bytes.
	PropDoorbells = 0x1000
)

// AQA returns the value of the Admin Queue Attributes for two queues of so many entries, 2 to 4096.
func AQA(entries int) uint32 { return uint32(entries-1)<<16 | uint32(entries-1) }

// AdminDoorbellBuffer is the opcode of Doorbell Buffer Config (NVMe Base 2.0, section 5.8). Its PRP1 is the page of
// shadow doorbells, and PRP2 that of event indexes.
const AdminDoorbellBuffer = 0x7C

// OACSDoorbellBuffer is the bit of OACS for Doorbell Buffer Config.
const OACSDoorbellBuffer = 1 << 8

// PRP1 and PRP2 are the data pointer of a command with PSDTPRP: the first page, and the second page or a list of all
// further ones.
func (s *SQE) PRP1() uint64     { return binary.LittleEndian.Uint64(s[24:]) }
func (s *SQE) SetPRP1(v uint64) { binary.LittleEndian.PutUint64(s[24:], v) }
func (s *SQE) PRP2() uint64     { return binary.LittleEndian.Uint64(s[32:]) }
func (s *SQE) SetPRP2(v uint64) { binary.LittleEndian.PutUint64(s[32:], v) }

// QueueSQE reads an SQE as Create or Delete I/O Submission or Completion Queue (NVMe Base 2.0, sections 5.4 to 5.7):
//
//	CDW10: 31:16 QSIZE, 0-based | 15:0 QID
//	CDW11: 31:16 interrupt vector (CQ) or CQID (SQ) | 1 IEN (CQ) | 0 PC      PRP1: the queue
type QueueSQE SQE

// Queue reads the command as one that creates or deletes a queue.
func (s *SQE) Queue() *QueueSQE { return (*QueueSQE)(s) }

// Bits of CDW11.
const (
	queuePC  = 1 << 0 // physically contiguous
	queueIEN = 1 << 1 // interrupts enabled
)

func (q *QueueSQE) QID() uint16     { return le.Uint16(q[40:]) }
func (q *QueueSQE) SetQID(v uint16) { le.PutUint16(q[40:], v) }

// Entries is the size of the queue, 1-based.
func (q *QueueSQE) Entries() int     { return int(le.Uint16(q[42:])) + 1 }
func (q *QueueSQE) SetEntries(n int) { le.PutUint16(q[42:], uint16(n-1)) }

// SetCompletion makes it the command for a contiguous completion queue, with interrupts of that vector; negative:
// without.
func (q *QueueSQE) SetCompletion(vector int) {
	q[44] = queuePC
	if vector >= 0 {
		q[44] |= queueIEN
		le.PutUint16(q[46:], uint16(vector))
	}
}

// SetSubmission makes it the command for a contiguous submission queue that completes to that completion queue.
func (q *QueueSQE) SetSubmission(cqid uint16) {
	q[44] = queuePC
	le.PutUint16(q[46:], cqid)
}

// Contiguous is PC; Interrupts is IEN; Vector is the interrupt vector, or the CQID of a submission queue.
func (q *QueueSQE) Contiguous() bool { return q[44]&queuePC != 0 }
func (q *QueueSQE) Interrupts() bool { return q[44]&queueIEN != 0 }
func (q *QueueSQE) Vector() uint16   { return le.Uint16(q[46:]) }
