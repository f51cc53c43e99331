package nvme

// DiscoveryHeaderSize and DiscoveryEntrySize are sizes within the discovery log.
const (
	DiscoveryHeaderSize = 1024
	DiscoveryEntrySize  = 1024
)

// DiscoveryHeader begins log page 70h (NVMe Base 2.0, Discovery Log Page).
//
//	0..7 GENCTR | 8..15 NUMREC | 16..17 RECFMT | 18..1023 reserved | entries of 1024 bytes
type DiscoveryHeader [DiscoveryHeaderSize]byte

// Offsets of the fields.
const (
	dhGENCTR = 0
	dhNUMREC = 8
	dhRECFMT = 16
)

// GENCTR counts changes of the log.
func (h *DiscoveryHeader) GENCTR() uint64     { return le.Uint64(h[dhGENCTR:]) }
func (h *DiscoveryHeader) SetGENCTR(v uint64) { le.PutUint64(h[dhGENCTR:], v) }

// NUMREC is the number of entries that follow.
func (h *DiscoveryHeader) NUMREC() uint64     { return le.Uint64(h[dhNUMREC:]) }
func (h *DiscoveryHeader) SetNUMREC(v uint64) { le.PutUint64(h[dhNUMREC:], v) }

// RECFMT is 0.
func (h *DiscoveryHeader) RECFMT() uint16     { return le.Uint16(h[dhRECFMT:]) }
func (h *DiscoveryHeader) SetRECFMT(v uint16) { le.PutUint16(h[dhRECFMT:], v) }

// DiscoveryEntry describes one path to one subsystem.
//
//	0 TRTYPE | 1 ADRFAM | 2 SUBTYPE | 3 TREQ | 4..5 PORTID | 6..7 CNTLID | 8..9 ASQSZ | 10..11 EFLAGS
//	32..63 TRSVCID | 256..511 SUBNQN | 512..767 TRADDR | 768..1023 TSAS
type DiscoveryEntry [DiscoveryEntrySize]byte

// Offsets of the fields.
const (
	deTRTYPE  = 0
	deADRFAM  = 1
	deSUBTYPE = 2
	deTREQ    = 3
	dePORTID  = 4
	deCNTLID  = 6
	deASQSZ   = 8
	deEFLAGS  = 10
	deTRSVCID = 32
	deSubNQN  = 256
	deTRADDR  = 512
)

const deTSAS = 768

// Values of discovery entry fields.
const (
	TRTYPERDMA = 1
	TRTYPEFC   = 2
	TRTYPETCP  = 3
	TRTYPELoop = 254

	ADRFAMIPv4 = 1
	ADRFAMIPv6 = 2
	ADRFAMIB   = 3
	ADRFAMFC   = 4
	ADRFAMLoop = 254

	SUBTYPEDiscovery        = 1 // a referral to another discovery service
	SUBTYPENVM              = 2
	SUBTYPEDiscoveryCurrent = 3 // this discovery service

	TREQSecureNotSpecified = 0
	TREQSecureRequired     = 1
	TREQSecureNotRequired  = 2
	TREQDisableSQFlow      = 1 << 2

	DiscoveryEflagDUPRETINFO = 1 << 0 // the same information on every such port
	DiscoveryEflagEPCSD      = 1 << 1 // persistent connections to discovery
	DiscoveryEflagNCC        = 1 << 2 // not connected to a CDC

	TSASTCPNone  = 0
	TSASTCPTLS12 = 1
	TSASTCPTLS13 = 2

	// MinASQSZ is the minimum ASQSZ of an entry.
	MinASQSZ = 32
)

func (e *DiscoveryEntry) TRTYPE() uint8      { return e[deTRTYPE] }
func (e *DiscoveryEntry) SetTRTYPE(v uint8)  { e[deTRTYPE] = v }
func (e *DiscoveryEntry) ADRFAM() uint8      { return e[deADRFAM] }
func (e *DiscoveryEntry) SetADRFAM(v uint8)  { e[deADRFAM] = v }
func (e *DiscoveryEntry) SUBTYPE() uint8     { return e[deSUBTYPE] }
func (e *DiscoveryEntry) SetSUBTYPE(v uint8) { e[deSUBTYPE] = v }

// TREQ holds transport requirements: bits 1:0 secure channel, bit 2 SQ flow control may be disabled. See the TREQ
// constants.
func (e *DiscoveryEntry) TREQ() uint8     { return e[deTREQ] }
func (e *DiscoveryEntry) SetTREQ(v uint8) { e[deTREQ] = v }

// PORTID is unique to the port (one transport address) in the subsystem.
func (e *DiscoveryEntry) PORTID() uint16     { return le.Uint16(e[dePORTID:]) }
func (e *DiscoveryEntry) SetPORTID(v uint16) { le.PutUint16(e[dePORTID:], v) }

// CNTLID is FFFFh for the dynamic controller model.
func (e *DiscoveryEntry) CNTLID() uint16     { return le.Uint16(e[deCNTLID:]) }
func (e *DiscoveryEntry) SetCNTLID(v uint16) { le.PutUint16(e[deCNTLID:], v) }

// ASQSZ is the maximum size of the admin submission queue, at least 32.
func (e *DiscoveryEntry) ASQSZ() uint16     { return le.Uint16(e[deASQSZ:]) }
func (e *DiscoveryEntry) SetASQSZ(v uint16) { le.PutUint16(e[deASQSZ:], v) }

// EFLAGS: DiscoveryEflag constants.
func (e *DiscoveryEntry) EFLAGS() uint16     { return le.Uint16(e[deEFLAGS:]) }
func (e *DiscoveryEntry) SetEFLAGS(v uint16) { le.PutUint16(e[deEFLAGS:], v) }

// TRSVCID and TRADDR are ASCII. They are written with trailing spaces, and read with trailing spaces or NULs.
func (e *DiscoveryEntry) TRSVCID() string     { return asciiField(e[deTRSVCID : deTRSVCID+32]) }
func (e *DiscoveryEntry) SetTRSVCID(s string) { setASCII(e[deTRSVCID:deTRSVCID+32], s) }

// SubNQN is terminated by a NUL.
func (e *DiscoveryEntry) SubNQN() string     { return textField(e[deSubNQN : deSubNQN+256]) }
func (e *DiscoveryEntry) SetSubNQN(s string) { setText(e[deSubNQN:deSubNQN+256], s) }
func (e *DiscoveryEntry) TRADDR() string     { return asciiField(e[deTRADDR : deTRADDR+256]) }
func (e *DiscoveryEntry) SetTRADDR(s string) { setASCII(e[deTRADDR:deTRADDR+256], s) }

// TSASTCP is the security type of a TCP address: TSASTCP constants.
func (e *DiscoveryEntry) TSASTCP() uint8     { return e[deTSAS] }
func (e *DiscoveryEntry) SetTSASTCP(v uint8) { e[deTSAS] = v }

// Values of TSASRDMA: reliable connected queue pairs, a provider of any kind, the RDMA connection
// manager.
const (
	RDMAConnected           = 1
	RDMAProviderUnspecified = 1
	RDMACM                  = 1
)

// TSASRDMA of an RDMA address: queue pair type (1 connected), provider type (1 none, 2
// InfiniBand, 3 RoCE, 4 RoCEv2, 5 iWARP), connection management (1 RDMA_CM).
func (e *DiscoveryEntry) TSASRDMA() (qptype, prtype, cms uint8) {
	return e[deTSAS], e[deTSAS+1], e[deTSAS+2]
}

// SetTSASRDMA sets the RDMA subtype.
func (e *DiscoveryEntry) SetTSASRDMA(qptype, prtype, cms uint8) {
	e[deTSAS], e[deTSAS+1], e[deTSAS+2] = qptype, prtype, cms
}

// Check validates an entry; the error names the invalid field. Unknown values of TRTYPE and ADRFAM are valid, because a
// host skips entries with transports that it does not support.
func (e *DiscoveryEntry) Check() error {
	const what = "discovery log entry"
	nqn := e[deSubNQN : deSubNQN+256]
	switch {
	case e.SUBTYPE() < SUBTYPEDiscovery || e.SUBTYPE() > SUBTYPEDiscoveryCurrent:
		return fieldError(what, "SUBTYPE", e.SUBTYPE(), "1 to 3")
	case !terminated(nqn):
		return fieldError(what, "SUBNQN", "unterminated", "at most 223 bytes and a NUL")
	}
	if err := CheckNQN(textField(nqn)); err != nil {
		return fieldError(what, "SUBNQN", err, "an NQN")
	}
	if !isASCII(e.TRADDR()) {
		return fieldError(what, "TRADDR", e.TRADDR(), "printable ASCII")
	}
	if !isASCII(e.TRSVCID()) {
		return fieldError(what, "TRSVCID", e.TRSVCID(), "printable ASCII")
	}
	return nil
}

// DiscoveryLog is a complete log as received: a header and entries.
type DiscoveryLog []byte

// Header returns the header of the log, or an empty one if the log is too short.
func (l DiscoveryLog) Header() *DiscoveryHeader {
	if len(l) < DiscoveryHeaderSize {
		return new(DiscoveryHeader)
	}
	return (*DiscoveryHeader)(l)
}

// Len returns the number of complete entries, at most NUMREC.
func (l DiscoveryLog) Len() int {
	if len(l) < DiscoveryHeaderSize {
		return 0
	}
	n := (len(l) - DiscoveryHeaderSize) / DiscoveryEntrySize
	if r := l.Header().NUMREC(); r < uint64(n) {
		n = int(r)
	}
	return n
}

// Entry returns entry i, 0 to Len()-1, as a view of l.
func (l DiscoveryLog) Entry(i int) *DiscoveryEntry {
	return (*DiscoveryEntry)(l[DiscoveryHeaderSize+i*DiscoveryEntrySize:])
}

// Check validates the header and the entries: the log must be complete and of a known format, and every entry valid.
func (l DiscoveryLog) Check() error {
	const what = "discovery log"
	if len(l) < DiscoveryHeaderSize {
		return fieldError(what, "length", len(l), "at least 1024")
	}
	h := l.Header()
	if h.RECFMT() != 0 {
		return fieldError(what, "RECFMT", h.RECFMT(), "0")
	}
	if h.NUMREC() != uint64(l.Len()) {
		return fieldError(what, "NUMREC", h.NUMREC(), "the number of entries that follow")
	}
	for i := range l.Len() {
		if err := l.Entry(i).Check(); err != nil {
			return err
		}
	}
	return nil
}
