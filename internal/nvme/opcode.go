package nvme

// Admin command opcodes (NVMe Base 2.0, figure 138).
const (
	AdminDeleteIOSQ  = 0x00
	AdminCreateIOSQ  = 0x01
	AdminGetLogPage  = 0x02
	AdminDeleteIOCQ  = 0x04
	AdminCreateIOCQ  = 0x05
	AdminIdentify    = 0x06
	AdminAbort       = 0x08
	AdminSetFeatures = 0x09
	AdminGetFeatures = 0x0A
	AdminAsyncEvent  = 0x0C
	AdminKeepAlive   = 0x18
	OpFabrics        = 0x7F // admin and I/O queues
)

// NVM command set opcodes (NVM Command Set 1.0, figure 18).
const (
	CmdFlush       = 0x00
	CmdWrite       = 0x01
	CmdRead        = 0x02
	CmdWriteUncorr = 0x04
	CmdCompare     = 0x05
	CmdWriteZeroes = 0x08
	CmdDSM         = 0x09
	CmdVerify      = 0x0C
)

// Fabrics command types (NVMe Base 2.0, figure 513).
const (
	FabricsPropertySet = 0x00
	FabricsConnect     = 0x01
	FabricsPropertyGet = 0x04
	FabricsAuthSend    = 0x05
	FabricsAuthReceive = 0x06
	FabricsDisconnect  = 0x08
)

// Bits of CDW12 in NVM I/O commands.
const (
	CDW12FUA         = 1 << 30
	CDW12LR          = 1 << 31 // limited retry
	CDW12Deallocate  = 1 << 25 // Write Zeroes: DEAC
	DSMDeallocate    = 1 << 2  // CDW11 of Dataset Management: AD
	NSIDBroadcast    = 0xFFFFFFFF
	DiscoveryNQN     = "nqn.2014-08.org.nvmexpress.discovery"
	CNTLIDDynamic    = 0xFFFF
	CNTLIDStatic     = 0xFFFE
	MaxNQNLen        = 223
	DefaultIOPort    = 4420
	DefaultDiscovery = 8009
)

// DataDirection returns the direction of a command's data, from the low two bits of its opcode (NVMe Base 2.0, section
// 3.3.3: 00b none, 01b host to controller, 10b controller to host, 11b both).
func DataDirection(opcode uint8) (toController, toHost bool) {
	return opcode&1 != 0, opcode&2 != 0
}
