package nvme

import "jbofd/internal/units"

// Log page identifiers (NVMe Base 2.0, section 5.16.1).
const (
	LIDSupported    = 0x00
	LIDError        = 0x01
	LIDSMART        = 0x02
	LIDFirmwareSlot = 0x03
	LIDChangedNS    = 0x04
	LIDEffects      = 0x05
	LIDANA          = 0x0C
	LIDFIDEffects   = 0x12
	LIDDiscovery    = 0x70
	LIDReservation  = 0x80
	// LIDClusterMap is a vendor specific page (docs/wire-extensions.md, ExtClusterMap): a ClusterMap.
	LIDClusterMap = 0xC1
)

// SupportedLogPages is log page 00h: a dword for each LID (NVMe Base 2.0, section
// 5.16.1.1).
type SupportedLogPages [1024]byte

// Bits of a LID's dword.
const (
	LIDSupportedBit = 1 << 0 // LSUPP
	LIDIndexOffset  = 1 << 1 // IOS: offset type 1 may be used
)

// LID returns the dword for a log page.
func (l *SupportedLogPages) LID(lid uint8) uint32 { return le.Uint32(l[4*int(lid):]) }

// SetLID sets the dword for a log page.
func (l *SupportedLogPages) SetLID(lid uint8, v uint32) { le.PutUint32(l[4*int(lid):], v) }

// ErrorLogEntrySize is the size of an Error Information log entry.
const ErrorLogEntrySize = 64

// ErrorLogEntry is an entry of log page 01h (NVMe Base 2.0, section 5.16.1.2). A log is a
// row of them, newest first.
type ErrorLogEntry [ErrorLogEntrySize]byte

// Offsets of the fields.
const (
	errErrorCount      = 0
	errSQID            = 8
	errCID             = 10
	errParamLocation   = 14
	errLBA             = 16
	errNSID            = 24
	errVendorLog       = 28
	errTRTYPE          = 29
	errCSI             = 30
	errOpcode          = 31
	errCommandSpecific = 32
	errTRTYPEInfo      = 40
	errVersion         = 63
)

const errStatus = 12

// Status is the status the command was completed with.
func (e *ErrorLogEntry) Status() Status     { return Status(le.Uint16(e[errStatus:]) >> 1) }
func (e *ErrorLogEntry) SetStatus(s Status) { le.PutUint16(e[errStatus:], uint16(s)<<1) }

// ErrorCount is unique to the entry, never 0.
func (e *ErrorLogEntry) ErrorCount() uint64     { return le.Uint64(e[errErrorCount:]) }
func (e *ErrorLogEntry) SetErrorCount(v uint64) { le.PutUint64(e[errErrorCount:], v) }
func (e *ErrorLogEntry) SQID() uint16           { return le.Uint16(e[errSQID:]) }
func (e *ErrorLogEntry) SetSQID(v uint16)       { le.PutUint16(e[errSQID:], v) }
func (e *ErrorLogEntry) CID() uint16            { return le.Uint16(e[errCID:]) }
func (e *ErrorLogEntry) SetCID(v uint16)        { le.PutUint16(e[errCID:], v) }

// ParamLocation is the byte (7:0) and bit (10:8) of the invalid field in the command, or FFFFh if no field is invalid.
func (e *ErrorLogEntry) ParamLocation() uint16       { return le.Uint16(e[errParamLocation:]) }
func (e *ErrorLogEntry) SetParamLocation(v uint16)   { le.PutUint16(e[errParamLocation:], v) }
func (e *ErrorLogEntry) LBA() units.LBA              { return units.LBA(le.Uint64(e[errLBA:])) }
func (e *ErrorLogEntry) SetLBA(v units.LBA)          { le.PutUint64(e[errLBA:], uint64(v)) }
func (e *ErrorLogEntry) NSID() uint32                { return le.Uint32(e[errNSID:]) }
func (e *ErrorLogEntry) SetNSID(v uint32)            { le.PutUint32(e[errNSID:], v) }
func (e *ErrorLogEntry) VendorLog() uint8            { return e[errVendorLog] }
func (e *ErrorLogEntry) SetVendorLog(v uint8)        { e[errVendorLog] = v }
func (e *ErrorLogEntry) TRTYPE() uint8               { return e[errTRTYPE] }
func (e *ErrorLogEntry) SetTRTYPE(v uint8)           { e[errTRTYPE] = v }
func (e *ErrorLogEntry) CSI() uint8                  { return e[errCSI] }
func (e *ErrorLogEntry) SetCSI(v uint8)              { e[errCSI] = v }
func (e *ErrorLogEntry) Opcode() uint8               { return e[errOpcode] }
func (e *ErrorLogEntry) SetOpcode(v uint8)           { e[errOpcode] = v }
func (e *ErrorLogEntry) CommandSpecific() uint64     { return le.Uint64(e[errCommandSpecific:]) }
func (e *ErrorLogEntry) SetCommandSpecific(v uint64) { le.PutUint64(e[errCommandSpecific:], v) }
func (e *ErrorLogEntry) TRTYPEInfo() uint16          { return le.Uint16(e[errTRTYPEInfo:]) }
func (e *ErrorLogEntry) SetTRTYPEInfo(v uint16)      { le.PutUint16(e[errTRTYPEInfo:], v) }
func (e *ErrorLogEntry) Version() uint8              { return e[errVersion] }
func (e *ErrorLogEntry) SetVersion(v uint8)          { e[errVersion] = v }

// NoParamLocation is the ParamLocation of an error that no field of the command has caused.
const NoParamLocation = 0xFFFF

// SMARTLog is log page 02h (NVMe Base 2.0, section 5.16.1.3).
type SMARTLog [512]byte

// Offsets of the fields.
const (
	smartCriticalWarning         = 0
	smartTemperature             = 1
	smartAvailableSpare          = 3
	smartAvailableSpareThreshold = 4
	smartPercentageUsed          = 5
	smartDataUnitsRead           = 32
	smartDataUnitsWritten        = 48
	smartHostReads               = 64
	smartHostWrites              = 80
	smartControllerBusyTime      = 96
	smartPowerCycles             = 112
	smartPowerOnHours            = 128
	smartUnsafeShutdowns         = 144
	smartMediaErrors             = 160
	smartErrorLogEntries         = 176
	smartWarningTempTime         = 192
	smartCriticalTempTime        = 196
)

const smartSensors = 200

// Bits of SMARTLog.CriticalWarning.
const (
	SMARTWarnSpare       = 1 << 0
	SMARTWarnTemperature = 1 << 1
	SMARTWarnReliability = 1 << 2
	SMARTWarnReadOnly    = 1 << 3
	SMARTWarnBackup      = 1 << 4
)

// CriticalWarning: SMARTWarn bits.
func (l *SMARTLog) CriticalWarning() uint8     { return l[smartCriticalWarning] }
func (l *SMARTLog) SetCriticalWarning(v uint8) { l[smartCriticalWarning] = v }

// Celsius returns a temperature of a SMARTLog, which is in whole kelvins, in degrees Celsius, as other hosts do.
func Celsius(kelvin uint16) int { return int(kelvin) - 273 }

// Temperature is the composite temperature in kelvin.
func (l *SMARTLog) Temperature() uint16     { return le.Uint16(l[smartTemperature:]) }
func (l *SMARTLog) SetTemperature(v uint16) { le.PutUint16(l[smartTemperature:], v) }

// AvailableSpare, AvailableSpareThreshold and PercentageUsed are in percent.
func (l *SMARTLog) AvailableSpare() uint8              { return l[smartAvailableSpare] }
func (l *SMARTLog) SetAvailableSpare(v uint8)          { l[smartAvailableSpare] = v }
func (l *SMARTLog) AvailableSpareThreshold() uint8     { return l[smartAvailableSpareThreshold] }
func (l *SMARTLog) SetAvailableSpareThreshold(v uint8) { l[smartAvailableSpareThreshold] = v }
func (l *SMARTLog) PercentageUsed() uint8              { return l[smartPercentageUsed] }
func (l *SMARTLog) SetPercentageUsed(v uint8)          { l[smartPercentageUsed] = v }

// DataUnitsRead and DataUnitsWritten count thousands of 512 byte units, rounded up.
func (l *SMARTLog) DataUnitsRead() Uint128        { return getUint128(l[smartDataUnitsRead:]) }
func (l *SMARTLog) SetDataUnitsRead(v Uint128)    { putUint128(l[smartDataUnitsRead:], v) }
func (l *SMARTLog) DataUnitsWritten() Uint128     { return getUint128(l[smartDataUnitsWritten:]) }
func (l *SMARTLog) SetDataUnitsWritten(v Uint128) { putUint128(l[smartDataUnitsWritten:], v) }
func (l *SMARTLog) HostReads() Uint128            { return getUint128(l[smartHostReads:]) }
func (l *SMARTLog) SetHostReads(v Uint128)        { putUint128(l[smartHostReads:], v) }
func (l *SMARTLog) HostWrites() Uint128           { return getUint128(l[smartHostWrites:]) }
func (l *SMARTLog) SetHostWrites(v Uint128)       { putUint128(l[smartHostWrites:], v) }

// ControllerBusyTime is in minutes.
func (l *SMARTLog) ControllerBusyTime() Uint128     { return getUint128(l[smartControllerBusyTime:]) }
func (l *SMARTLog) SetControllerBusyTime(v Uint128) { putUint128(l[smartControllerBusyTime:], v) }
func (l *SMARTLog) PowerCycles() Uint128            { return getUint128(l[smartPowerCycles:]) }
func (l *SMARTLog) SetPowerCycles(v Uint128)        { putUint128(l[smartPowerCycles:], v) }
func (l *SMARTLog) PowerOnHours() Uint128           { return getUint128(l[smartPowerOnHours:]) }
func (l *SMARTLog) SetPowerOnHours(v Uint128)       { putUint128(l[smartPowerOnHours:], v) }
func (l *SMARTLog) UnsafeShutdowns() Uint128        { return getUint128(l[smartUnsafeShutdowns:]) }
func (l *SMARTLog) SetUnsafeShutdowns(v Uint128)    { putUint128(l[smartUnsafeShutdowns:], v) }
func (l *SMARTLog) MediaErrors() Uint128            { return getUint128(l[smartMediaErrors:]) }
func (l *SMARTLog) SetMediaErrors(v Uint128)        { putUint128(l[smartMediaErrors:], v) }
func (l *SMARTLog) ErrorLogEntries() Uint128        { return getUint128(l[smartErrorLogEntries:]) }
func (l *SMARTLog) SetErrorLogEntries(v Uint128)    { putUint128(l[smartErrorLogEntries:], v) }

// WarningTempTime and CriticalTempTime are in minutes.
func (l *SMARTLog) WarningTempTime() uint32      { return le.Uint32(l[smartWarningTempTime:]) }
func (l *SMARTLog) SetWarningTempTime(v uint32)  { le.PutUint32(l[smartWarningTempTime:], v) }
func (l *SMARTLog) CriticalTempTime() uint32     { return le.Uint32(l[smartCriticalTempTime:]) }
func (l *SMARTLog) SetCriticalTempTime(v uint32) { le.PutUint32(l[smartCriticalTempTime:], v) }

// TemperatureSensor returns sensor i, 1 to 8, in kelvin, or 0 if there is no such sensor.
func (l *SMARTLog) TemperatureSensor(i int) uint16 {
	if i < 1 || i > 8 {
		return 0
	}
	return le.Uint16(l[smartSensors+2*(i-1):])
}

// SetTemperatureSensor sets sensor i, 1 to 8.
func (l *SMARTLog) SetTemperatureSensor(i int, kelvin uint16) {
	le.PutUint16(l[smartSensors+2*(i-1):], kelvin)
}

// FirmwareSlotLog is log page 03h (NVMe Base 2.0, section 5.16.1.4).
type FirmwareSlotLog [512]byte

// AFI: bits 2:0 the active slot, bits 6:4 the slot after the next reset.
func (l *FirmwareSlotLog) AFI() uint8     { return l[0] }
func (l *FirmwareSlotLog) SetAFI(v uint8) { l[0] = v }

// FRS is the revision in slot i, 1 to 7; "" when there is no such slot.
func (l *FirmwareSlotLog) FRS(i int) string {
	if i < 1 || i > 7 {
		return ""
	}
	return asciiField(l[8*i : 8*i+8])
}

// SetFRS sets the revision in slot i, 1 to 7.
func (l *FirmwareSlotLog) SetFRS(i int, s string) { setASCII(l[8*i:8*i+8], s) }

// Effects is the entry of one command in the Commands Supported and Effects log.
type Effects uint32

// Bits of Effects.
const (
	EffectSupported Effects = 1 << 0  // CSUPP
	EffectLBCC      Effects = 1 << 1  // logical block content change
	EffectNCC       Effects = 1 << 2  // namespace capability change
	EffectNIC       Effects = 1 << 3  // namespace inventory change
	EffectCCC       Effects = 1 << 4  // controller capability change
	EffectAloneOnNS Effects = 1 << 16 // CSE 1: no other command to the namespace at the same time
	EffectAlone     Effects = 2 << 16 // CSE 2: no other command to any namespace at the same time
)

// EffectsLog is log page 05h for one command set (NVMe Base 2.0, section 5.16.1.6):
// 256 admin and 256 I/O commands, a dword each.
type EffectsLog [4096]byte

// Admin and IO return the effects of an opcode.
func (l *EffectsLog) Admin(op uint8) Effects { return Effects(le.Uint32(l[4*int(op):])) }
func (l *EffectsLog) IO(op uint8) Effects    { return Effects(le.Uint32(l[1024+4*int(op):])) }

// SetAdmin and SetIO set the effects of an opcode.
func (l *EffectsLog) SetAdmin(op uint8, e Effects) { le.PutUint32(l[4*int(op):], uint32(e)) }
func (l *EffectsLog) SetIO(op uint8, e Effects)    { le.PutUint32(l[1024+4*int(op):], uint32(e)) }
