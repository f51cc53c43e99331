package nvme

import "jbofd/internal/uuid"

// ConnectSQE reads an SQE as a Connect command (NVMe Base 2.0, section 6.3):
//
//	40..41 RECFMT | 42..43 QID | 44..45 SQSIZE | 46 CATTR | 47 reserved | 48..51 KATO
type ConnectSQE SQE

// Offsets of Connect fields in the SQE, as IPO names them.
const (
	ConnectOffRECFMT = 40
	ConnectOffQID    = 42
	ConnectOffSQSIZE = 44
	ConnectOffCATTR  = 46
	ConnectOffKATO   = 48
)

// Bits of CATTR.
const (
	CATTRPriorityMask     = 3 << 0
	CATTRDisableSQFlow    = 1 << 2 // the host does not use SQHD
	CATTRDeleteQueues     = 1 << 3 // individual I/O queues may be deleted: Disconnect
	CATTRConnectionIntent = 1 << 4
)

// Connect reads the command as Connect.
func (s *SQE) Connect() *ConnectSQE { return (*ConnectSQE)(s) }

// Init makes the command a Connect; CID, SGL and the fields follow.
func (c *ConnectSQE) Init() {
	*c = ConnectSQE{}
	s := (*SQE)(c)
	s.SetOpcode(OpFabrics)
	s.SetFCTYPE(FabricsConnect)
	s.SetPSDT(PSDTSGL)
}

func (c *ConnectSQE) RECFMT() uint16     { return le.Uint16(c[ConnectOffRECFMT:]) }
func (c *ConnectSQE) SetRECFMT(v uint16) { le.PutUint16(c[ConnectOffRECFMT:], v) }

// QID is 0 for the admin queue.
func (c *ConnectSQE) QID() uint16     { return le.Uint16(c[ConnectOffQID:]) }
func (c *ConnectSQE) SetQID(v uint16) { le.PutUint16(c[ConnectOffQID:], v) }

// SQSIZE is the number of entries minus one.
func (c *ConnectSQE) SQSIZE() uint16     { return le.Uint16(c[ConnectOffSQSIZE:]) }
func (c *ConnectSQE) SetSQSIZE(v uint16) { le.PutUint16(c[ConnectOffSQSIZE:], v) }
func (c *ConnectSQE) CATTR() uint8       { return c[ConnectOffCATTR] }
func (c *ConnectSQE) SetCATTR(v uint8)   { c[ConnectOffCATTR] = v }

// KATO is the keep-alive timeout in milliseconds; 0 disables it. It applies to the admin queue only.
func (c *ConnectSQE) KATO() uint32     { return le.Uint32(c[ConnectOffKATO:]) }
func (c *ConnectSQE) SetKATO(v uint32) { le.PutUint32(c[ConnectOffKATO:], v) }

// ConnectDataSize is the size of Connect's data.
const ConnectDataSize = 1024

// ConnectData is the data of Connect (NVMe Base 2.0, section 6.3):
//
//	0..15 HOSTID | 16..17 CNTLID | 18..255 reserved | 256..511 SUBNQN | 512..767 HOSTNQN | 768..1023 reserved
type ConnectData [ConnectDataSize]byte

// Offsets of fields in ConnectData, as IPO names them.
const (
	ConnectDataOffHOSTID  = 0
	ConnectDataOffCNTLID  = 16
	ConnectDataOffSUBNQN  = 256
	ConnectDataOffHOSTNQN = 512
)

// HostID is the host identifier, the same for every connection of a host.
func (d *ConnectData) HostID() uuid.UUID     { return uuid.UUID(d[ConnectDataOffHOSTID:]) }
func (d *ConnectData) SetHostID(v uuid.UUID) { copy(d[ConnectDataOffHOSTID:], v[:]) }

// CNTLID is FFFFh to request a new controller (dynamic model); otherwise it is the controller to which the I/O queue
// belongs.
func (d *ConnectData) CNTLID() uint16     { return le.Uint16(d[ConnectDataOffCNTLID:]) }
func (d *ConnectData) SetCNTLID(v uint16) { le.PutUint16(d[ConnectDataOffCNTLID:], v) }

// SubNQN returns the NQN of the requested subsystem, HostNQN that of the host. Each call allocates its string.
func (d *ConnectData) SubNQN() string {
	return textField(d[ConnectDataOffSUBNQN : ConnectDataOffSUBNQN+256])
}
func (d *ConnectData) SetSubNQN(s string) {
	setText(d[ConnectDataOffSUBNQN:ConnectDataOffSUBNQN+256], s)
}
func (d *ConnectData) HostNQN() string {
	return textField(d[ConnectDataOffHOSTNQN : ConnectDataOffHOSTNQN+256])
}
func (d *ConnectData) SetHostNQN(s string) {
	setText(d[ConnectDataOffHOSTNQN:ConnectDataOffHOSTNQN+256], s)
}

// ConnectFault describes an invalid parameter of a Connect.
type ConnectFault struct {
	// InData: the parameter is in the data rather than in the SQE (IATTR).
	InData bool
	// Offset is the offset of the parameter in the data or the SQE (IPO).
	Offset uint16
	// What is a description for the log.
	What string
}

func (f *ConnectFault) Error() string { return "Connect: " + f.What }

// connectNQNs are the NQNs in ConnectData.
var connectNQNs = [...]struct {
	name string
	off  uint16
}{{"SUBNQN", ConnectDataOffSUBNQN}, {"HOSTNQN", ConnectDataOffHOSTNQN}}

// CheckLengths returns a fault if an NQN is longer than 223 bytes, or nil.
func (d *ConnectData) CheckLengths() *ConnectFault {
	for _, f := range connectNQNs {
		if !terminated(d[f.off : int(f.off)+256]) {
			return &ConnectFault{InData: true, Offset: f.off, What: f.name + " does not end within 223 bytes"}
		}
	}
	return nil
}

// Check returns a fault if an NQN is invalid, or nil.
func (d *ConnectData) Check() *ConnectFault {
	if f := d.CheckLengths(); f != nil {
		return f
	}
	for _, f := range connectNQNs {
		if err := CheckNQN(textField(d[f.off : int(f.off)+256])); err != nil {
			return &ConnectFault{InData: true, Offset: f.off, What: f.name + ": " + err.Error()}
		}
	}
	return nil
}

// SetConnectOK fills the completion of a Connect that succeeded.
//
//	DW0: 15:0 CNTLID | 31:16 AUTHREQ
func (c *CQE) SetConnectOK(cntlid uint16) {
	c.SetDW0(uint32(cntlid))
	c.SetStatus(Success)
}

// ConnectCNTLID returns the controller identifier in the completion of a successful Connect.
func (c *CQE) ConnectCNTLID() uint16 { return uint16(c.DW0()) }

// AUTHREQ bits: the controller requires authentication, by TLS and DH-HMAC-CHAP (ASCR) or by DH-HMAC-CHAP alone (ATR).
const (
	AUTHREQATR  = 1 << 17
	AUTHREQASCR = 1 << 18
)

// SetConnectInvalid fills the completion of a Connect with an invalid parameter: status Connect Invalid Parameters with
// DNR.
//
//	DW0: 15:0 IPO | 23:16 IATTR, bit 0: in the data
func (c *CQE) SetConnectInvalid(f *ConnectFault) {
	c.SetDW0(uint32(f.Offset) | uint32(b2u(f.InData))<<16)
	c.SetStatus(ConnectInvalidParameters | DNR)
}

// ConnectFault returns the invalid parameter from a completion with status Connect Invalid Parameters.
func (c *CQE) ConnectFault() ConnectFault {
	f := ConnectFault{InData: c.DW0()>>16&1 != 0, Offset: uint16(c.DW0())}
	f.What = f.field() + " is invalid"
	return f
}

func (f *ConnectFault) field() string {
	if f.InData {
		switch f.Offset {
		case ConnectDataOffHOSTID:
			return "HOSTID"
		case ConnectDataOffCNTLID:
			return "CNTLID"
		case ConnectDataOffSUBNQN:
			return "SUBNQN"
		case ConnectDataOffHOSTNQN:
			return "HOSTNQN"
		}
		return "a field of the data"
	}
	switch f.Offset {
	case ConnectOffRECFMT:
		return "RECFMT"
	case ConnectOffQID:
		return "QID"
	case ConnectOffSQSIZE:
		return "SQSIZE"
	case ConnectOffCATTR:
		return "CATTR"
	case ConnectOffKATO:
		return "KATO"
	}
	return "a field of the SQE"
}

// PropertySQE reads an SQE as Property Get or Property Set (NVMe Base 2.0, sections
// 6.5 and 6.6):
//
//	40 ATTRIB | 44..47 OFST | 48..55 VALUE (Set)
type PropertySQE SQE

// Property reads the command as Property Get or Set.
func (s *SQE) Property() *PropertySQE { return (*PropertySQE)(s) }

// Init makes the command a Property Get or Set (an FCTYPE) of the property at off.
func (p *PropertySQE) Init(fctype uint8, off uint32) {
	*p = PropertySQE{}
	s := (*SQE)(p)
	s.SetOpcode(OpFabrics)
	s.SetFCTYPE(fctype)
	s.SetPSDT(PSDTSGL)
	if PropertySize(off) == 8 {
		p[40] = 1
	}
	le.PutUint32(p[44:], off)
}

// SizeBytes returns the size of the property that ATTRIB states: 4 or 8, or 0 for reserved values.
func (p *PropertySQE) SizeBytes() int {
	switch p[40] & 7 {
	case 0:
		return 4
	case 1:
		return 8
	}
	return 0
}

// OFST is the property's offset.
func (p *PropertySQE) OFST() uint32 { return le.Uint32(p[44:]) }

// VALUE is the value to set; the upper half is reserved for 4 byte properties.
func (p *PropertySQE) VALUE() uint64     { return le.Uint64(p[48:]) }
func (p *PropertySQE) SetVALUE(v uint64) { le.PutUint64(p[48:], v) }

// InitDisconnect makes the command a Disconnect (NVMe Base 2.0, section 6.4).
func (s *SQE) InitDisconnect() {
	*s = SQE{}
	s.SetOpcode(OpFabrics)
	s.SetFCTYPE(FabricsDisconnect)
	s.SetPSDT(PSDTSGL)
}
