package flash

import (
	"errors"
	"fmt"
	"math/bits"
	"strings"
)

// unitBytes is the size of a mapping unit, the granularity of the translation layer.
const unitBytes = 4096

// maxDies is the maximum number of dies. Sets of dies are 64-bit words.
const maxDies = 64

// Config describes a drive. Times are nanoseconds of virtual time. Preset returns a calibrated configuration; changing
// one of its fields does not adjust the others.
type Config struct {
	// SizeBytes is the capacity that hosts see, a positive multiple of 4096.
	SizeBytes int64
	// Seed is the seed of all random decisions.
	Seed uint64
	// Slowdown multiplies all times below. It is 1 (or 0, which means 1) to MaxSlowdown. Random decisions and the order
	// of events do not depend on it.
	Slowdown int

	// Channels times DiesPerChannel is at most 64. A channel transfers data for one of its dies at a time.
	Channels, DiesPerChannel int
	// ChannelBytesPerSec is the transfer rate of one channel.
	ChannelBytesPerSec int64
	// PageBytes is the most that one flash read fetches, a power of two of at least 4096. A program writes one page in
	// each of Planes planes.
	PageBytes, Planes int
	// BlockPrograms is the number of programs that fill a block across all planes, a power of two. An erase covers
	// Planes * PageBytes * BlockPrograms bytes.
	BlockPrograms int
	// ReadNS is the time from the command to the die until the page is in its register, varied by up to JitterPercent
	// in both directions. RegisterNS is the time of a read whose page is in the register already.
	ReadNS, RegisterNS int64
	// ProgramNS is the time to program Planes pages. EraseNS is the time to erase a block.
	ProgramNS, EraseNS int64
	// JitterPercent is the uniform variation of ReadNS and ProgramNS, 0 to 50.
	JitterPercent int64

	// Calm, PressedProgram and PressedCollect determine how a die divides its time between writes (programs, garbage
	// collection and erases) and reads. Calm applies while at least a quarter of the write buffer is free. When host
	// writes wait or will soon have to wait, PressedProgram applies to programs of host data, and PressedCollect to
	// garbage collection and erases.
	Calm, PressedProgram, PressedCollect Share
	// SuspendNS is the time lost each time that a program or an erase is suspended for reads.
	SuspendNS int64

	// The controller processes one item at a time. ReadOpNS is its time for each flash read (a run of adjacent units
	// within a page), WriteOpNS for each page of a write, and CommandNS for each command that transfers no data. Data
	// passes through it at ReadBytesPerSec and WriteBytesPerSec.
	ReadOpNS, WriteOpNS, CommandNS    int64
	ReadBytesPerSec, WriteBytesPerSec int64
	// The fixed latency of a command that occupies no resource: the bus, the interrupt and the firmware's path.
	ReadLatencyNS, WriteLatencyNS, FlushLatencyNS int64
	// UnmapNSPerMiB is the controller's time to unmap 1 MiB.
	UnmapNSPerMiB int64

	// BufferBytes is the size of the write buffer. A write completes when its data is in the buffer.
	BufferBytes int64
	// VolatileBuffer: the buffer loses its data with the power. A Flush, and a write with FUA, then waits until what
	// was in the buffer has been programmed. Buffers of data-centre drives have capacitors.
	VolatileBuffer bool
	// OverProvisionPermille is the additional flash that hosts do not see, in thousandths of SizeBytes. It does not
	// include the blocks that GCReserveBlocks and GCStartBlocks keep erased.
	OverProvisionPermille int64
	// A die collects garbage while it has at most GCStartBlocks erased blocks. It keeps GCReserveBlocks of them from
	// host writes. 2 <= GCReserveBlocks <= GCStartBlocks.
	GCReserveBlocks, GCStartBlocks int

	// InPlace drives (3D XPoint) have no translation layer, write buffer, garbage collection or erase. Each unit is
	// read in ReadNS and written in place in ProgramNS.
	InPlace bool
}

// MaxSlowdown is the maximum of Config.Slowdown.
const MaxSlowdown = 1000

// Share limits how long writes (programs, garbage collection and erases) and reads occupy a die while both wait, so
// that neither starves.
type Share struct {
	// SliceNS is how long writes run before reads may suspend them. ReadBurstNS is how long reads then run before
	// writes resume.
	SliceNS, ReadBurstNS int64
}

// ErrConfig is wrapped by the errors that report an invalid Config.
var ErrConfig = errors.New("flash: invalid configuration")

var presetNames = []string{"dct983", "p4800x", "sata", "qlc", "gen4", "gen5"}

// Presets returns the names that Preset accepts.
func Presets() []string { return append([]string(nil), presetNames...) }

// Preset returns the configuration of a known drive with a capacity of sizeBytes. The geometry scales with the
// capacity; times and rates do not.
//
//   - dct983: a data-centre TLC drive of the PCIe 3 generation (Samsung DCT983 960 GB).
//   - p4800x: 3D XPoint (Intel Optane DC P4800X).
//   - sata: a SATA drive for clients: 95,000 reads of 4 KiB a second, 0.5 GB/s, a volatile write buffer.
//   - qlc: a QLC drive of the PCIe 4 generation: programs and erases are slow.
//   - gen4: a drive of the PCIe 4 generation with 1.5 million reads of 4 KiB a second and 6.8 GB/s.
//   - gen5: a drive of the PCIe 5 generation with 1.7 million reads of 4 KiB a second and 11 GB/s.
//
// Only dct983 is calibrated against measurements. The others have the rates of data sheets, in the proportions of
// dct983: policies must also share drives for which nobody has tuned them.
//
// Errors: ErrConfig for an unknown name or an impossible size.
func Preset(name string, sizeBytes int64) (Config, error) {
	var c Config
	switch name {
	case "dct983":
		c = tlc(sizeBytes)
	case "p4800x":
		c = Config{
			SizeBytes: sizeBytes, Seed: 1, InPlace: true,
			Channels: 8, DiesPerChannel: 4, ChannelBytesPerSec: 2_000e6,
			PageBytes: 4096, Planes: 1, BlockPrograms: 1,
			ReadNS: 2_000, RegisterNS: 2_000, ProgramNS: 2_500, JitterPercent: 10,
			ReadOpNS: 50, WriteOpNS: 50, CommandNS: 500, ReadBytesPerSec: 2_450e6, WriteBytesPerSec: 2_250e6,
			ReadLatencyNS: 4_500, WriteLatencyNS: 4_500, FlushLatencyNS: 4_500, UnmapNSPerMiB: 1_000,
		}
	case "sata":
		c = tlc(sizeBytes)
		c.DiesPerChannel, c.ChannelBytesPerSec, c.VolatileBuffer = 2, 400e6, true
		c.ReadNS, c.ReadOpNS, c.WriteOpNS, c.CommandNS = 70_000, 3_000, 3_000, 8_000
		c.ReadBytesPerSec, c.WriteBytesPerSec = 550e6, 520e6
		c.ReadLatencyNS, c.WriteLatencyNS, c.FlushLatencyNS = 60_000, 40_000, 60_000
		c.geometry()
	case "qlc":
		c = tlc(sizeBytes)
		c.ReadNS, c.ProgramNS, c.Planes = 110_000, 2_800_000, 4
		c.Calm, c.PressedProgram = Share{600_000, 900_000}, Share{1_600_000, 200_000}
		c.ReadOpNS, c.ReadBytesPerSec, c.WriteBytesPerSec = 1_200, 6_500e6, 5_000e6
		c.geometry()
		c.EraseNS *= 2
	case "gen4":
		c = tlc(sizeBytes)
		c.DiesPerChannel, c.ChannelBytesPerSec, c.ReadNS, c.ProgramNS = 8, 1_600e6, 35_000, 700_000
		c.ReadOpNS, c.WriteOpNS, c.CommandNS, c.ReadBytesPerSec, c.WriteBytesPerSec = 80, 200, 500, 7_000e6, 7_000e6
		c.ReadLatencyNS, c.WriteLatencyNS = 15_000, 10_000
		c.geometry()
	case "gen5":
		c = tlc(sizeBytes)
		c.Channels, c.DiesPerChannel, c.ChannelBytesPerSec, c.ReadNS, c.ProgramNS = 16, 4, 2_400e6, 33_000, 600_000
		c.ReadOpNS, c.WriteOpNS, c.CommandNS, c.ReadBytesPerSec, c.WriteBytesPerSec = 300, 300, 500, 14_000e6, 12_000e6
		c.ReadLatencyNS, c.WriteLatencyNS = 12_000, 8_000
		c.geometry()
	default:
		return Config{}, fmt.Errorf("%w: preset is %q; allowed: %s", ErrConfig, name, strings.Join(presetNames, ", "))
	}
	return c, c.check()
}

// tlc returns the configuration of dct983.
func tlc(sizeBytes int64) Config {
	c := Config{
		SizeBytes: sizeBytes, Seed: 1,
		Channels: 8, DiesPerChannel: 4, ChannelBytesPerSec: 800e6,
		PageBytes: 16 << 10, Planes: 2,
		ReadNS: 60_000, RegisterNS: 3_000, ProgramNS: 930_000, JitterPercent: 10,
		Calm: Share{300_000, 600_000}, PressedProgram: Share{800_000, 100_000},
		PressedCollect: Share{300_000, 200_000}, SuspendNS: 10_000,
		ReadOpNS: 1_570, WriteOpNS: 1_500, CommandNS: 1_500, ReadBytesPerSec: 4_500e6, WriteBytesPerSec: 4_500e6,
		ReadLatencyNS: 20_000, WriteLatencyNS: 21_000, FlushLatencyNS: 15_000, UnmapNSPerMiB: 1_000,
		BufferBytes:           min(64<<20, max(1<<20, sizeBytes/256&^(1<<20-1))),
		OverProvisionPermille: 90, GCReserveBlocks: 2, GCStartBlocks: 4,
	}
	c.geometry()
	return c
}

// geometry chooses blocks so that there are about 130 per die at any capacity, with at least 16 programs each, and a
// buffer of at least a program for each die.
func (c *Config) geometry() {
	c.BufferBytes = max(c.BufferBytes, int64(c.dies()*c.Planes*c.PageBytes))
	perDie := c.SizeBytes / int64(c.dies()*c.Planes*c.PageBytes)
	c.BlockPrograms = 16
	for int64(c.BlockPrograms)*192 < perDie {
		c.BlockPrograms *= 2
	}
	c.EraseNS = 30_000 * int64(c.BlockPrograms)
}

func (c *Config) dies() int            { return c.Channels * c.DiesPerChannel }
func (c *Config) programUnits() uint32 { return uint32(c.Planes * c.PageBytes / unitBytes) }

// blocksPerDie returns the number of blocks of each die at this capacity.
func (c *Config) blocksPerDie() int64 {
	block := int64(c.Planes) * int64(c.PageBytes) * int64(c.BlockPrograms) * int64(c.dies())
	hosts := c.SizeBytes/1000*(1000+c.OverProvisionPermille) + c.BufferBytes
	return (hosts+block-1)/block + int64(c.GCStartBlocks) + 1
}

// check returns an error that names the first invalid field.
func (c *Config) check() error {
	positive := func(ns ...int64) bool {
		for _, n := range ns {
			if n < 0 || n > 1e12 {
				return false
			}
		}
		return true
	}
	bad := func(field string, value any, allowed string) error {
		return fmt.Errorf("%w: %s is %v; allowed: %s", ErrConfig, field, value, allowed)
	}
	switch {
	case c.SizeBytes < 16<<20 || c.SizeBytes%unitBytes != 0 || c.SizeBytes > 4<<40:
		return bad("SizeBytes", c.SizeBytes, "a multiple of 4096, 16 MiB to 4 TiB")
	case c.Slowdown < 0 || c.Slowdown > MaxSlowdown:
		return bad("Slowdown", c.Slowdown, fmt.Sprintf("0 to %d", MaxSlowdown))
	case c.Channels < 1 || c.DiesPerChannel < 1 || c.dies() > maxDies:
		return bad("Channels * DiesPerChannel", fmt.Sprintf("%d * %d", c.Channels, c.DiesPerChannel),
			fmt.Sprintf("1 to %d dies", maxDies))
	case c.PageBytes < unitBytes || c.PageBytes > 64<<10 || bits.OnesCount(uint(c.PageBytes)) != 1:
		return bad("PageBytes", c.PageBytes, "a power of two, 4096 to 65536")
	case c.Planes < 1 || c.Planes*c.PageBytes/unitBytes > maxProgramUnits || bits.OnesCount(uint(c.Planes)) != 1:
		return bad("Planes", c.Planes, fmt.Sprintf("a power of two with at most %d units of 4096 bytes a program",
			maxProgramUnits))
	case c.BlockPrograms < 1 || c.BlockPrograms > 1<<20 || bits.OnesCount(uint(c.BlockPrograms)) != 1:
		return bad("BlockPrograms", c.BlockPrograms, "a power of two, 1 to 1048576")
	case c.ChannelBytesPerSec < 1e6 || c.ReadBytesPerSec < 1e6 || c.WriteBytesPerSec < 1e6:
		return bad("a rate", min(c.ChannelBytesPerSec, c.ReadBytesPerSec, c.WriteBytesPerSec), "1 MB/s or more")
	case c.JitterPercent < 0 || c.JitterPercent > 50:
		return bad("JitterPercent", c.JitterPercent, "0 to 50")
	case c.ReadNS < 1 || c.ProgramNS < 1 || !positive(c.ReadNS, c.RegisterNS, c.ProgramNS, c.EraseNS, c.SuspendNS,
		c.ReadOpNS, c.WriteOpNS,
		c.CommandNS, c.ReadLatencyNS, c.WriteLatencyNS, c.FlushLatencyNS, c.UnmapNSPerMiB):
		return bad("a time", "outside its bounds", "0 to 1e12 ns, ReadNS and ProgramNS 1 or more")
	case c.InPlace:
		return nil
	case min(c.Calm.SliceNS, c.Calm.ReadBurstNS, c.PressedProgram.SliceNS, c.PressedProgram.ReadBurstNS,
		c.PressedCollect.SliceNS, c.PressedCollect.ReadBurstNS) < 1:
		return bad("Calm, PressedProgram, PressedCollect", fmt.Sprint(c.Calm, c.PressedProgram, c.PressedCollect),
			"slices and bursts of 1 ns or more")
	case c.BufferBytes < int64(c.dies()*c.Planes*c.PageBytes) || c.BufferBytes > c.SizeBytes/4:
		return bad("BufferBytes", c.BufferBytes, "a program for each die to a quarter of SizeBytes")
	case c.OverProvisionPermille < 20 || c.OverProvisionPermille > 10_000:
		return bad("OverProvisionPermille", c.OverProvisionPermille, "20 to 10000")
	case c.GCReserveBlocks < 2 || c.GCStartBlocks < c.GCReserveBlocks || c.GCStartBlocks > 1000:
		return bad("GCReserveBlocks, GCStartBlocks", fmt.Sprintf("%d, %d", c.GCReserveBlocks, c.GCStartBlocks),
			"2 <= reserve <= start <= 1000")
	}
	if units := c.blocksPerDie() * int64(c.dies()*c.BlockPrograms) * int64(c.programUnits()); units >= int64(inBuffer) {
		return bad("SizeBytes with OverProvisionPermille", units, "less than 2147483648 units of 4096 bytes in all")
	}
	return nil
}
