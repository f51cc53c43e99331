package label

import "bytes"

// signature is a mark by which other software identifies its data on a drive.
type signature struct {
	name   string
	offset int
	bytes  string
}

// signatures are looked for in the first MiB of a drive, the most specific ones first. Source: util-linux,
// libblkid/src/superblocks and partitions.
var signatures = []signature{
	{"a GPT partition table", 512, "EFI PART"},
	{"a GPT partition table", 4096, "EFI PART"},
	{"an ext2/3/4 file system", 0x438, "\x53\xEF"},
	{"an XFS file system", 0, "XFSB"},
	{"a btrfs file system", 0x10040, "_BHRfS_M"},
	{"an F2FS file system", 1024, "\x10\x20\xF5\xF2"},
	{"an NTFS file system", 3, "NTFS    "},
	{"a FAT file system", 82, "FAT32   "},
	{"a FAT file system", 54, "FAT1"},
	{"an exFAT file system", 3, "EXFAT   "},
	{"an ISO 9660 file system", 0x8001, "CD001"},
	{"swap space", 4086, "SWAPSPACE2"},
	{"swap space", 4086, "SWAP-SPACE"},
	{"an LVM physical volume", 512, "LABELONE"},
	{"an LVM physical volume", 0, "LABELONE"},
	{"an LVM physical volume", 1024, "LABELONE"},
	{"a LUKS volume", 0, "LUKS\xBA\xBE"},
	{"a Linux RAID member", 4096, "\xFC\x4E\x2B\xA9"},
	{"a Linux RAID member", 0, "\xFC\x4E\x2B\xA9"},
	{"a bcache device", 4096 + 24, "\xC6\x85\x73\xF6\x4E\x1A\x45\xCA\x82\x65\xF5\x7F\x48\xBA\x6D\x81"},
	{"a ZFS pool member", 128 << 10, "\x0C\xB1\xBA\x00"},
	{"a Ceph BlueStore device", 0, "bluestore block device"},
	{"an SPDK blobstore", 0, "SPDKBLOB"},
	{"a qcow2 image", 0, "QFI\xFB"},
	{"an MBR partition table or boot sector", 510, "\x55\xAA"},
}

// recognise names what the first MiB of a drive looks like, or "".
func recognise(head []byte) string {
	for _, s := range signatures {
		if len(head) >= s.offset+len(s.bytes) && bytes.Equal(head[s.offset:s.offset+len(s.bytes)], []byte(s.bytes)) {
			return s.name
		}
	}
	return ""
}

// recogniseTail names what the last bytes of a drive look like, or "".
func recogniseTail(tail []byte) string {
	for _, block := range []int{512, 4096} {
		if i := len(tail) - block; i >= 0 && bytes.HasPrefix(tail[i:], []byte("EFI PART")) {
			return "the backup of a GPT partition table"
		}
	}
	return ""
}
