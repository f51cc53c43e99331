package nvme

import "fmt"

// Status is the 15-bit status field of a completion without the phase bit
// (NVMe Base 2.0, figure 93):
//
//	 14    13    12:11  10:8   7:0
//	+-----+-----+------+------+------+
//	| DNR | M   | CRD  | SCT  | SC   |
//	+-----+-----+------+------+------+
//
// Status is a value, not an error: it is the outcome of a command, not a failure of the program.
type Status uint16

// DNR is the Do Not Retry bit. More means that the Error Information log has more information.
const (
	DNR  Status = 1 << 14
	More Status = 1 << 13
)

// Status code types.
const (
	SCTGeneric = 0
	SCTCommand = 1
	SCTMedia   = 2
	SCTPath    = 3
	SCTVendor  = 7
)

// Generic command status.
const (
	Success                  Status = 0x000
	InvalidOpcode            Status = 0x001
	InvalidField             Status = 0x002
	CommandIDConflict        Status = 0x003
	DataTransferError        Status = 0x004
	AbortedPowerLoss         Status = 0x005
	InternalError            Status = 0x006
	AbortRequested           Status = 0x007
	AbortedSQDeletion        Status = 0x008
	AbortedFailedFused       Status = 0x009
	AbortedMissingFused      Status = 0x00A
	InvalidNamespaceOrFormat Status = 0x00B
	CommandSequenceError     Status = 0x00C
	InvalidSGLSegment        Status = 0x00D
	InvalidSGLCount          Status = 0x00E
	DataSGLLengthInvalid     Status = 0x00F
	MetadataSGLLengthInvalid Status = 0x010
	SGLTypeInvalid           Status = 0x011
	OperationDenied          Status = 0x015
	SGLOffsetInvalid         Status = 0x016
	HostIDInconsistentFormat Status = 0x018
	KeepAliveExpired         Status = 0x019
	KeepAliveInvalid         Status = 0x01A
	AbortedPreemptAbort      Status = 0x01B
	SanitizeFailed           Status = 0x01C
	SGLDataBlockGranularity  Status = 0x01E
	CommandNotSupportedInCMB Status = 0x01F
	NamespaceWriteProtected  Status = 0x020
	CommandInterrupted       Status = 0x021
	TransientTransportError  Status = 0x022
	AdminMediaNotReady       Status = 0x024
	LBAOutOfRange            Status = 0x080
	CapacityExceeded         Status = 0x081
	NamespaceNotReady        Status = 0x082
	ReservationConflict      Status = 0x083
	FormatInProgress         Status = 0x084
	InvalidValueSize         Status = 0x085 // KV
	InvalidKeySize           Status = 0x086 // KV
	KeyDoesNotExist          Status = 0x087 // KV
	UnrecoveredKVError       Status = 0x088 // KV
	KeyExists                Status = 0x089 // KV
)

// Command specific status.
const (
	CompletionQueueInvalid       Status = 0x100
	InvalidQueueID               Status = 0x101
	InvalidQueueSize             Status = 0x102
	AbortLimitExceeded           Status = 0x103
	AERLimitExceeded             Status = 0x105
	InvalidFirmwareSlot          Status = 0x106
	InvalidLogPage               Status = 0x109
	InvalidFormat                Status = 0x10A
	FeatureNotSaveable           Status = 0x10D
	FeatureNotChangeable         Status = 0x10E
	FeatureNotNamespaceSpecific  Status = 0x10F
	NamespaceAlreadyAttached     Status = 0x118
	NamespaceNotAttached         Status = 0x11A
	InvalidControllerID          Status = 0x11F
	ANAAttachFailed              Status = 0x125
	ANAGroupIDInvalid            Status = 0x124
	IOCommandSetNotSupported     Status = 0x129
	IOCommandSetNotEnabled       Status = 0x12A
	InvalidIOCommandSet          Status = 0x12C
	ConflictingAttributes        Status = 0x180 // NVM command set
	InvalidProtectionInformation Status = 0x181
	WriteToReadOnlyRange         Status = 0x182
	CommandSizeLimitExceeded     Status = 0x183
	ConnectIncompatibleFormat    Status = 0x180 // fabrics
	ConnectControllerBusy        Status = 0x181
	ConnectInvalidParameters     Status = 0x182
	ConnectRestartDiscovery      Status = 0x183
	ConnectInvalidHost           Status = 0x184
	InvalidQueueType             Status = 0x185
	DiscoverRestart              Status = 0x190
	AuthenticationRequired       Status = 0x191
)

// Command specific status of extended key-value (docs/wire-extensions.md).
const (
	KVVersionMismatch Status = 0x1C0
	KVSuperseded      Status = 0x1C1
	KVIndeterminate   Status = 0x1C2
	KVInvalidHeader   Status = 0x1C3
)

// Command specific status of replication and of namespaces that are replicated (docs/wire-extensions.md).
const (
	// KVWrongView: the node does not serve the range in this way in the view of its epoch, which is in DW0.
	KVWrongView Status = 0x1C4
)

// Media and data integrity status.
const (
	WriteFault           Status = 0x280
	UnrecoveredReadError Status = 0x281
	GuardCheckError      Status = 0x282
	AppTagCheckError     Status = 0x283
	RefTagCheckError     Status = 0x284
	CompareFailure       Status = 0x285
	AccessDenied         Status = 0x286
	DeallocatedBlock     Status = 0x287
)

// Path related status.
const (
	InternalPathError   Status = 0x300
	ANAPersistentLoss   Status = 0x301
	ANAInaccessible     Status = 0x302
	ANATransition       Status = 0x303
	ControllerPathError Status = 0x360
	HostPathError       Status = 0x370
	AbortedByHost       Status = 0x371
)

// SCT is the status code type.
func (s Status) SCT() uint8 { return uint8(s>>8) & 7 }

// SC is the status code.
func (s Status) SC() uint8 { return uint8(s) }

// Code returns the status without DNR, More and the retry delay. Compare it with the constants of this package.
func (s Status) Code() Status { return s & 0x7ff }

// DNR reports whether the host should not retry.
func (s Status) DNR() bool { return s&DNR != 0 }

// OK reports success.
func (s Status) OK() bool { return s.Code() == Success }

// String returns the name of the status and its bits, in the words of nvme-cli.
func (s Status) String() string {
	name := statusNames[s.Code()]
	if name == "" {
		name = "status"
	}
	dnr := ""
	if s.DNR() {
		dnr = ", DNR"
	}
	return fmt.Sprintf("%s (sct %#x, sc %#02x%s)", name, s.SCT(), s.SC(), dnr)
}

var statusNames = map[Status]string{
	Success: "Success", InvalidOpcode: "Invalid Command Opcode", InvalidField: "Invalid Field in Command",
	CommandIDConflict: "Command ID Conflict", DataTransferError: "Data Transfer Error", InternalError: "Internal Error",
	AbortRequested: "Command Abort Requested", AbortedSQDeletion: "Command Aborted due to SQ Deletion",
	AbortedFailedFused: "Command Aborted due to Failed Fused Command", AbortedMissingFused: "Command Aborted due to " +
		"Missing Fused Command",
	InvalidNamespaceOrFormat: "Invalid Namespace or Format", CommandSequenceError: "Command Sequence Error",
	InvalidSGLSegment: "Invalid SGL Segment Descriptor", InvalidSGLCount: "Invalid Number of SGL Descriptors",
	DataSGLLengthInvalid: "Data SGL Length Invalid", SGLTypeInvalid: "SGL Descriptor Type Invalid",
	SGLOffsetInvalid: "SGL Offset Invalid", OperationDenied: "Operation Denied",
	KeepAliveExpired: "Keep Alive Timeout Expired",
	KeepAliveInvalid: "Keep Alive Timeout Invalid", LBAOutOfRange: "LBA Out of Range",
	CapacityExceeded:  "Capacity Exceeded",
	NamespaceNotReady: "Namespace Not Ready", NamespaceWriteProtected: "Namespace is Write Protected",
	CommandInterrupted: "Command Interrupted", TransientTransportError: "Transient Transport Error",
	InvalidQueueID: "Invalid Queue Identifier", InvalidQueueSize: "Invalid Queue Size",
	AbortLimitExceeded: "Abort Command Limit Exceeded",
	AERLimitExceeded:   "Asynchronous Event Request Limit Exceeded", InvalidLogPage: "Invalid Log Page",
	FeatureNotSaveable: "Feature Identifier Not Saveable", FeatureNotChangeable: "Feature Not Changeable",
	FeatureNotNamespaceSpecific: "Feature Not Namespace Specific", InvalidControllerID: "Invalid Controller Identifier",
	ConnectIncompatibleFormat: "Connect Incompatible Format", ConnectControllerBusy: "Connect Controller Busy",
	ConnectInvalidParameters: "Connect Invalid Parameters", ConnectRestartDiscovery: "Connect Restart Discovery",
	ConnectInvalidHost: "Connect Invalid Host", DiscoverRestart: "Discover Restart",
	AuthenticationRequired: "Authentication Required",
	WriteFault:             "Write Fault", UnrecoveredReadError: "Unrecovered Read Error",
	CompareFailure: "Compare Failure",
	AccessDenied:   "Access Denied", DeallocatedBlock: "Deallocated or Unwritten Logical Block",
	InternalPathError: "Internal Path Error", ANAPersistentLoss: "Asymmetric Access Persistent Loss",
	ANAInaccessible: "Asymmetric Access Inaccessible", ANATransition: "Asymmetric Access Transition",
	HostPathError: "Host Pathing Error", AbortedByHost: "Command Aborted By Host",
	InvalidValueSize: "Invalid Value Size", InvalidKeySize: "Invalid Key Size",
	KeyDoesNotExist:    "KV Key Does Not Exist",
	UnrecoveredKVError: "Unrecovered Error", KeyExists: "KV Key Exists", InvalidQueueType: "Invalid Queue Type",
	InvalidIOCommandSet: "Invalid I/O Command Set", IOCommandSetNotSupported: "I/O Command Set Not Supported",
	KVVersionMismatch: "KV Version Mismatch", KVSuperseded: "KV Superseded", KVIndeterminate: "KV Indeterminate",
	KVInvalidHeader: "KV Invalid Header", KVWrongView: "KV Wrong View",
}
