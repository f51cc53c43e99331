package nvme

// IdentifySQE reads an SQE as Identify (NVMe Base 2.0, section 5.17):
//
//	CDW10: 31:16 CNTID | 7:0 CNS      CDW11: 31:24 CSI | 15:0 CNS specific identifier
type IdentifySQE SQE

// Identify reads the command as Identify.
func (s *SQE) Identify() *IdentifySQE { return (*IdentifySQE)(s) }

func (i *IdentifySQE) CNS() uint8           { return i[40] }
func (i *IdentifySQE) SetCNS(v uint8)       { i[40] = v }
func (i *IdentifySQE) CNTID() uint16        { return le.Uint16(i[42:]) }
func (i *IdentifySQE) SetCNTID(v uint16)    { le.PutUint16(i[42:], v) }
func (i *IdentifySQE) CNSID() uint16        { return le.Uint16(i[44:]) }
func (i *IdentifySQE) SetCNSID(v uint16)    { le.PutUint16(i[44:], v) }
func (i *IdentifySQE) CSI() CSI             { return CSI(i[47]) }
func (i *IdentifySQE) SetCSI(v CSI)         { i[47] = uint8(v) }
func (i *IdentifySQE) UUIDIndex() uint8     { return i[56] & 0x7f }
func (i *IdentifySQE) SetUUIDIndex(v uint8) { i[56] = v & 0x7f }

// GetLogSQE reads an SQE as Get Log Page (NVMe Base 2.0, section 5.16):
//
//	CDW10: 31:16 NUMDL | 15 RAE | 14:8 LSP | 7:0 LID      CDW11: 31:16 LSI | 15:0 NUMDU
//	CDW12, CDW13: LPO      CDW14: 31:24 CSI | 23 OT | 6:0 UUID index
type GetLogSQE SQE

// GetLog reads the command as Get Log Page.
func (s *SQE) GetLog() *GetLogSQE { return (*GetLogSQE)(s) }

func (g *GetLogSQE) LID() uint8     { return g[40] }
func (g *GetLogSQE) SetLID(v uint8) { g[40] = v }

// LSP is the log specific parameter, 7 bits.
func (g *GetLogSQE) LSP() uint8     { return g[41] & 0x7f }
func (g *GetLogSQE) SetLSP(v uint8) { g[41] = g[41]&0x80 | v&0x7f }

// RAE: retain the asynchronous event. The event of this log stays pending until the log is read without RAE.
func (g *GetLogSQE) RAE() bool     { return g[41]&0x80 != 0 }
func (g *GetLogSQE) SetRAE(v bool) { g[41] = g[41]&0x7f | uint8(b2u(v))<<7 }

// LenBytes returns the requested length in bytes, from the 0-based count of dwords (NUMD).
func (g *GetLogSQE) LenBytes() uint64 {
	numd := uint64(le.Uint16(g[42:])) | uint64(le.Uint16(g[44:]))<<16
	return (numd + 1) * 4
}

// SetLenBytes sets NUMD. The argument n is a multiple of 4, from 4 to 2^34.
func (g *GetLogSQE) SetLenBytes(n uint64) {
	d := uint32(n/4 - 1)
	le.PutUint16(g[42:], uint16(d))
	le.PutUint16(g[44:], uint16(d>>16))
}

// LSI is the log specific identifier.
func (g *GetLogSQE) LSI() uint16     { return le.Uint16(g[46:]) }
func (g *GetLogSQE) SetLSI(v uint16) { le.PutUint16(g[46:], v) }

// LPO is the offset in bytes, or an index if OT is set.
func (g *GetLogSQE) LPO() uint64     { return le.Uint64(g[48:]) }
func (g *GetLogSQE) SetLPO(v uint64) { le.PutUint64(g[48:], v) }

// OT: LPO is an index.
func (g *GetLogSQE) OT() bool         { return g[58]&0x80 != 0 }
func (g *GetLogSQE) SetOT(v bool)     { g[58] = g[58]&0x7f | uint8(b2u(v))<<7 }
func (g *GetLogSQE) CSI() CSI         { return CSI(g[59]) }
func (g *GetLogSQE) SetCSI(v CSI)     { g[59] = uint8(v) }
func (g *GetLogSQE) UUIDIndex() uint8 { return g[56] & 0x7f }

// FeaturesSQE reads an SQE as Get Features or Set Features (NVMe Base 2.0, sections 5.15 and 5.27):
//
//	CDW10: 31 SV (Set) | 10:8 SEL (Get) | 7:0 FID      CDW11: the value
type FeaturesSQE SQE

// Features reads the command as Get or Set Features.
func (s *SQE) Features() *FeaturesSQE { return (*FeaturesSQE)(s) }

func (f *FeaturesSQE) FID() uint8     { return f[40] }
func (f *FeaturesSQE) SetFID(v uint8) { f[40] = v }

// SEL selects the value that Get Features returns: SEL constants.
func (f *FeaturesSQE) SEL() uint8     { return f[41] & 7 }
func (f *FeaturesSQE) SetSEL(v uint8) { f[41] = f[41]&^7 | v&7 }

// SV: Set Features saves the value persistently.
func (f *FeaturesSQE) SV() bool     { return f[43]&0x80 != 0 }
func (f *FeaturesSQE) SetSV(v bool) { f[43] = f[43]&0x7f | uint8(b2u(v))<<7 }

// Value is CDW11.
func (f *FeaturesSQE) Value() uint32     { return le.Uint32(f[44:]) }
func (f *FeaturesSQE) SetValue(v uint32) { le.PutUint32(f[44:], v) }

// AbortSQE reads an SQE as Abort (NVMe Base 2.0, section 5.1): CDW10: 31:16 CID | 15:0
// SQID.
type AbortSQE SQE

// Abort reads the command as Abort.
func (s *SQE) Abort() *AbortSQE { return (*AbortSQE)(s) }

// SQID and CID identify the command to abort.
func (a *AbortSQE) SQID() uint16     { return le.Uint16(a[40:]) }
func (a *AbortSQE) SetSQID(v uint16) { le.PutUint16(a[40:], v) }
func (a *AbortSQE) CID() uint16      { return le.Uint16(a[42:]) }
func (a *AbortSQE) SetCID(v uint16)  { le.PutUint16(a[42:], v) }

// AbortNotDone is bit 0 of an Abort's DW0: the command was not aborted.
const AbortNotDone = 1

// DSMRanges returns the number of ranges of Dataset Management. It is 1-based here and 0-based in CDW10.
func (s *SQE) DSMRanges() int     { return int(s[40]) + 1 }
func (s *SQE) SetDSMRanges(n int) { s[40] = uint8(n - 1) }
