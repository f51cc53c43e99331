package nvme

import (
	"fmt"

	"jbofd/internal/units"
)

// Feature identifiers (NVMe Base 2.0, section 5.27.1; NVM Command Set 1.0, section
// 4.1.4).
const (
	FIDArbitration            = 0x01
	FIDPowerManagement        = 0x02
	FIDLBARange               = 0x03
	FIDTemperatureThreshold   = 0x04
	FIDErrorRecovery          = 0x05
	FIDVolatileWriteCache     = 0x06
	FIDNumberOfQueues         = 0x07
	FIDInterruptCoalescing    = 0x08
	FIDInterruptConfiguration = 0x09
	FIDWriteAtomicity         = 0x0A
	FIDAsyncEvent             = 0x0B
	FIDTimestamp              = 0x0E
	FIDKeepAlive              = 0x0F
	FIDHostBehavior           = 0x16
	FIDIOCommandSetProfile    = 0x19
	FIDKeyValue               = 0x20 // KV command set: KVErrorOnDelete
	FIDHostIdentifier         = 0x81
	FIDReservationMask        = 0x82
	FIDReservationPersistence = 0x83
	FIDWriteProtect           = 0x84
	// FIDExtensions enables jbofd's extensions: docs/wire-extensions.md.
	FIDExtensions = 0xC0
)

// Values of SEL in Get Features.
const (
	SELCurrent   = 0
	SELDefault   = 1
	SELSaved     = 2
	SELSupported = 3
)

// Bits of completion DW0 of Get Features with SELSupported.
const (
	FeatureSaveable   = 1 << 0
	FeatureNSSpecific = 1 << 1
	FeatureChangeable = 1 << 2
)

// Bits of CDW11 of the Asynchronous Event Configuration feature, and of OAES.
const (
	AECSMART      = 0xff // one bit for each bit of SMARTLog.CriticalWarning
	AECNamespace  = 1 << 8
	AECFirmware   = 1 << 9
	AECTelemetry  = 1 << 10
	AECANA        = 1 << 11
	AECPredictLat = 1 << 12
	AECLBAStatus  = 1 << 13
	AECEndurance  = 1 << 14
	AECShutdown   = 1 << 15 // normal NVM subsystem shutdown
	AECDiscovery  = 1 << 31
)

// AER is the result of an Asynchronous Event Request, DW0 of its completion (NVMe
// Base 2.0, section 5.2.1): type (2:0), information (15:8), log page to read (23:16).
type AER uint32

// Event types.
const (
	AERTypeError  = 0
	AERTypeSMART  = 1
	AERTypeNotice = 2
	AERTypeNVM    = 6 // I/O command specific
	AERTypeVendor = 7
)

// Events.
const (
	// AERNamespaceChanged is notice 00h, log page 04h.
	AERNamespaceChanged AER = AERTypeNotice | 0x00<<8 | LIDChangedNS<<16
	// AERFirmwareActivation is notice 01h: the controller does not process commands until CSTS.PP is 0; log page 03h.
	AERFirmwareActivation AER = AERTypeNotice | 0x01<<8 | LIDFirmwareSlot<<16
	// AERANAChanged is notice 03h, log page 0Ch.
	AERANAChanged AER = AERTypeNotice | 0x03<<8 | LIDANA<<16
	// AERDiscoveryChanged is notice F0h, log page 70h.
	AERDiscoveryChanged AER = AERTypeNotice | 0xF0<<8 | LIDDiscovery<<16
	// AERPersistentError is error 03h: an internal error that stays; log page 01h.
	AERPersistentError AER = AERTypeError | 0x03<<8 | LIDError<<16
	// AERTransientError is error 04h.
	AERTransientError AER = AERTypeError | 0x04<<8 | LIDError<<16
	// AERTemperature is SMART event 01h: a temperature is beyond its threshold; log page 02h.
	AERTemperature AER = AERTypeSMART | 0x01<<8 | LIDSMART<<16
	// AERReliability is SMART event 00h: the subsystem's reliability suffers; log page 02h.
	AERReliability AER = AERTypeSMART | 0x00<<8 | LIDSMART<<16
)

// MakeAER returns the result of an Asynchronous Event Request.
func MakeAER(typ, info, lid uint8) AER {
	return AER(typ&7) | AER(info)<<8 | AER(lid)<<16
}

// Type is the event type, Info the event information, and LID the log page that clears the event.
func (a AER) Type() uint8 { return uint8(a) & 7 }
func (a AER) Info() uint8 { return uint8(a >> 8) }
func (a AER) LID() uint8  { return uint8(a >> 16) }

// aerNames say what events of these types and this information are (NVMe Base 2.0, figures 146 to 148).
var aerNames = map[uint8][]string{
	AERTypeError: {"write to an invalid doorbell register", "invalid doorbell value", "diagnostic failure",
		"persistent internal error", "transient internal error", "firmware image load error"},
	AERTypeSMART: {"reliability is degraded", "temperature beyond a threshold", "available spare below its threshold"},
	AERTypeNotice: {"a namespace has changed", "firmware activation starts", "the telemetry log has changed",
		"asymmetric namespace access has changed"},
}

// String says what the event is, in words where they are known.
func (a AER) String() string {
	if names := aerNames[a.Type()]; int(a.Info()) < len(names) {
		return names[a.Info()]
	}
	return fmt.Sprintf("event of type %#x, information %#02x", a.Type(), a.Info())
}

// NumberOfQueues encodes CDW11 and DW0 of the Number of Queues feature from counts of I/O
// queues, 1-based here, 0-based on the wire: SQs in bits 15:0, CQs in 31:16.
func NumberOfQueues(sqs, cqs uint16) uint32 { return uint32(sqs-1) | uint32(cqs-1)<<16 }

// ParseNumberOfQueues is the inverse. FFFFh on the wire, which is invalid, gives 65536.
func ParseNumberOfQueues(v uint32) (sqs, cqs int) {
	return int(v&0xffff) + 1, int(v>>16) + 1
}

// Bits of other features' CDW11.
const (
	ErrorRecoveryDULBE    = 1 << 16
	VolatileWriteCacheWCE = 1 << 0 // WCE
	WriteAtomicityDN      = 1 << 0
	HostIdentifierEXHID   = 1 << 0 // 128-bit
)

// Timestamp is the data of the Timestamp feature (NVMe Base 2.0, section 5.27.1):
//
//	0..5 milliseconds since 1970 | 6 attributes: bit 0 synch, bits 3:1 origin | 7 reserved
type Timestamp [8]byte

// MaxTimestampMS is the maximum time of a Timestamp.
const MaxTimestampMS = 1<<48 - 1

// Timestamp origins.
const (
	TimestampFromReset = 0 // counting from 0 since a reset
	TimestampFromHost  = 1 // set by Set Features
)

// UnixMS is the time in milliseconds since 1970.
func (t *Timestamp) UnixMS() uint64 { return le.Uint64(t[:]) & MaxTimestampMS }

// SetUnixMS sets the time modulo 2^48 and keeps the attributes.
func (t *Timestamp) SetUnixMS(ms uint64) {
	le.PutUint64(t[:], le.Uint64(t[:])&^uint64(MaxTimestampMS)|ms&MaxTimestampMS)
}

// Origin is bits 3:1 of the attributes.
func (t *Timestamp) Origin() uint8     { return t[6] >> 1 & 7 }
func (t *Timestamp) SetOrigin(v uint8) { t[6] = t[6]&^0xe | v&7<<1 }

// HostBehavior is the data of the Host Behavior Support feature (NVMe Base 2.0, section
// 5.27.1).
type HostBehavior [512]byte

// ACRE: advanced command retry (CRDT) may be used. ETDAS: extended telemetry data area 4. LBAFEE:
// LBA formats above 15 are understood.
func (h *HostBehavior) ACRE() uint8       { return h[0] }
func (h *HostBehavior) SetACRE(v uint8)   { h[0] = v }
func (h *HostBehavior) ETDAS() uint8      { return h[1] }
func (h *HostBehavior) SetETDAS(v uint8)  { h[1] = v }
func (h *HostBehavior) LBAFEE() uint8     { return h[2] }
func (h *HostBehavior) SetLBAFEE(v uint8) { h[2] = v }

// Check validates that the fields are 0 or 1.
func (h *HostBehavior) Check() error {
	for i, name := range []string{"ACRE", "ETDAS", "LBAFEE"} {
		if h[i] > 1 {
			return fieldError("Host Behavior Support", name, h[i], "0 or 1")
		}
	}
	return nil
}

// DSMRangeSize is the size of a Dataset Management range. MaxDSMRanges is the maximum number of ranges.
const (
	DSMRangeSize = 16
	MaxDSMRanges = 256
)

// DSMRange is one range of Dataset Management (NVM Command Set 1.0, section 3.2.3):
//
//	0..3 context attributes | 4..7 length in logical blocks | 8..15 starting LBA
type DSMRange [DSMRangeSize]byte

func (r *DSMRange) CATTR() uint32     { return le.Uint32(r[0:]) }
func (r *DSMRange) SetCATTR(v uint32) { le.PutUint32(r[0:], v) }

// NLB is the length in logical blocks. It is not 0-based: 0 stands for an empty range.
func (r *DSMRange) NLB() units.Blocks     { return units.Blocks(le.Uint32(r[4:])) }
func (r *DSMRange) SetNLB(v units.Blocks) { le.PutUint32(r[4:], uint32(v)) }
func (r *DSMRange) SLBA() units.LBA       { return units.LBA(le.Uint64(r[8:])) }
func (r *DSMRange) SetSLBA(v units.LBA)   { le.PutUint64(r[8:], uint64(v)) }
