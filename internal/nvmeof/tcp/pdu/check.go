package pdu

import (
	"encoding/binary"
	"fmt"
)

// Offsets of the common header's fields: what FEI names when one of them is
// wrong.
const (
	offType  = 0
	offFlags = 1
	offHLEN  = 2
	offPDO   = 3
	offPLEN  = 4
)

// shape is what a PDU type fixes about its common header.
type shape struct {
	hlen     uint8
	known    bool
	fromHost bool
	digests  bool // HDGST and DDGST apply
	data     dataRule
}

type dataRule uint8

const (
	dataNone     dataRule = iota // PLEN is exactly the header and its digest
	dataOptional                 // in-capsule data
	dataAlways
	dataTerm // a quotation of the PDU at fault, bounded, no PDO
)

var shapes = [16]shape{
	TypeICReq:       {hlen: ICLen, known: true, fromHost: true},
	TypeICResp:      {hlen: ICLen, known: true},
	TypeH2CTermReq:  {hlen: TermLen, known: true, fromHost: true, data: dataTerm},
	TypeC2HTermReq:  {hlen: TermLen, known: true, data: dataTerm},
	TypeCapsuleCmd:  {hlen: CapsuleCmdLen, known: true, fromHost: true, digests: true, data: dataOptional},
	TypeCapsuleResp: {hlen: CapsuleRespLen, known: true, digests: true},
	TypeH2CData:     {hlen: DataLen, known: true, fromHost: true, digests: true, data: dataAlways},
	TypeC2HData:     {hlen: DataLen, known: true, digests: true, data: dataAlways},
	TypeR2T:         {hlen: R2TLen, known: true, digests: true},
}

// CheckHeader judges the common header in h (at least CommonLen bytes) of a PDU
// sent by the host or by the controller under format f: the type goes in this
// direction, HLEN is the type's, the digest flags are those agreed on, PDO
// lies behind the header (and its digest) on the agreed alignment where there is
// data, and PLEN fits all of it. It returns nil when the header holds.
//
// What the caller still has to do: sequence (ICReq first, once), upper bounds of
// PLEN (in-capsule size, MAXH2CDATA; a TermReq's is checked here), and the fields
// behind the common header. A faulty TermReq is reported like any other PDU, but is
// never answered with a TermReq: the connection is just closed.
//
// Reserved flag bits, and PDO where there is no data, are not looked at: recipients
// need not check reserved fields, and later revisions may use them.
//
// Cost: 0 allocs when the header holds.
//
// Source: NVMe/TCP Transport 1.0, sections 3.3 (PDU construction), 3.5 (error handling),
// 3.6.1 (common header).
func CheckHeader(h []byte, fromHost bool, f Format) *FatalError { // hot: 0 allocs
	c := (*Common)(h)
	t := c.Type()
	if int(t) >= len(shapes) || !shapes[t].known || shapes[t].fromHost != fromHost {
		sender := "controller"
		if fromHost {
			sender = "host"
		}
		return headerFault(offType, "PDU type %s does not come from a %s", t, sender)
	}
	s := &shapes[t]
	if c.HLEN() != s.hlen {
		return headerFault(offHLEN, "%s: HLEN %d, must be %d", t, c.HLEN(), s.hlen)
	}
	if s.data == dataTerm {
		if n := c.PLEN(); n < TermLen || n > MaxTermLen {
			return headerFault(offPLEN, "%s: PLEN %d, must be %d to %d", t, n, TermLen, MaxTermLen)
		}
		return nil
	}
	end := uint32(s.hlen) // of the header with its digest
	if s.digests {
		if set := c.Flags()&FlagHDGST != 0; set != f.HeaderDigest {
			return headerFault(offFlags, "%s: HDGSTF is %t, header digest agreed on is %t", t, set, f.HeaderDigest)
		}
		if f.HeaderDigest {
			end += DigestLen
		}
	}
	plen := c.PLEN()
	if s.data == dataNone || s.data == dataOptional && plen == end {
		if plen != end {
			return headerFault(offPLEN, "%s: PLEN %d, must be %d", t, plen, end)
		}
		return nil
	}
	if plen <= end {
		return headerFault(offPLEN, "%s: PLEN %d, must be more than %d", t, plen, end)
	}
	if set := c.Flags()&FlagDDGST != 0; set != f.DataDigest {
		return headerFault(offFlags, "%s: DDGSTF is %t, data digest agreed on is %t", t, set, f.DataDigest)
	}
	pdo, align := uint32(c.PDO()), uint32(4)
	if f.AlignBytes > 4 {
		align = uint32(f.AlignBytes)
	}
	if pdo < end || pdo%align != 0 {
		return headerFault(offPDO, "%s: PDO %d, must be a multiple of %d and at least %d", t, pdo, align, end)
	}
	least := pdo + 1
	if f.DataDigest {
		least += DigestLen
	}
	if plen < least {
		return headerFault(offPLEN, "%s: PLEN %d, must be at least %d with PDO %d", t, plen, least, pdo)
	}
	return nil
}

// headerFault makes the FatalError for the header field at offset off.
func headerFault(off uint32, format string, args ...any) *FatalError {
	return &FatalError{FES: InvalidHeaderField, FEI: off, What: fmt.Sprintf(format, args...)}
}

// DataLength returns the number of data bytes in the PDU whose common header h has
// passed CheckHeader under f: PLEN without the header, digests and padding.
func DataLength(h []byte, f Format) int {
	c := (*Common)(h)
	s := &shapes[c.Type()&15]
	if s.data != dataOptional && s.data != dataAlways {
		return 0
	}
	n := int(c.HLEN())
	if f.HeaderDigest {
		n += DigestLen
	}
	if int(c.PLEN()) <= n {
		return 0
	}
	n = int(c.PDO())
	if f.DataDigest {
		n += DigestLen
	}
	return int(c.PLEN()) - n
}

// PutDigest stores a digest as the wire carries it: little endian, 4 bytes.
func PutDigest(b []byte, d uint32) { binary.LittleEndian.PutUint32(b, d) }

// GetDigest reads a digest from the wire.
func GetDigest(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
