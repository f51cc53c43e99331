package vm

// Platform is a computer that QEMU emulates in software, with Debian's kernel for it. Software emulation is used
// everywhere, so that a run here and in CI is the same run.
type Platform struct {
	// Arch is the name of its architecture, which Debian and Go share.
	Arch string
	// folder is where its kernel is, below the cache.
	folder string
	// qemu is the emulator, machine the computer, to which BootOptions.Machine is added, and cpu its processor.
	qemu, machine, cpu string
	// iommu are the arguments for an IOMMU, if machine has none.
	iommu []string
	// commandLine is that of the kernel, for the console and what spares it time.
	commandLine string
	// compressed: the kernel's image is a bzImage.
	compressed bool
	// packages are those that a guest's files come from, beside the kernel's.
	packages []string
	// native: programs of this machine run on it.
	native bool
}

// PC is a machine of the architecture amd64, whose guests have the tools of this machine. Five-level page tables would
// only slow the emulated walks.
var PC = &Platform{
	Arch: "amd64", folder: "kernel", compressed: true, native: true,
	qemu: "qemu-system-x86_64", machine: "q35", cpu: "max,la57=off",
	iommu:       []string{"-device", "intel-iommu,intremap=on,caching-mode=on"},
	commandLine: "console=ttyS0 tsc=reliable",
}

// ARM is a machine of the architecture arm64 with the processor of a Stingray or a BlueField-2, which has no atomic
// instructions but pairs of load and store (LDAXR, STLXR), and with an IOMMU. Its guests have Debian's busybox and the
// Files of BootOptions.
var ARM = &Platform{
	Arch: "arm64", folder: "kernel-arm64",
	qemu: "qemu-system-aarch64", machine: "virt,gic-version=3,iommu=smmuv3", cpu: "cortex-a72",
	commandLine: "console=ttyAMA0", packages: []string{"busybox-static"},
}

// armModules are the modules of a guest of ARM: its devices, a file system with its checksum, and what gives a drive to
// a process.
var armModules = []string{
	"virtio_pci", "virtio_console", "virtio_net", "virtio_blk", "crc32c_generic", "ext4", "nvme", "vfio_pci",
	"vfio_iommu_type1",
}

// kernelPackage is the Debian package that depends on the newest kernel image.
func (p *Platform) kernelPackage() string { return "linux-image-" + p.Arch }

// goEnvironment makes go build static programs for the platform.
func (p *Platform) goEnvironment() []string { return []string{"CGO_ENABLED=0", "GOARCH=" + p.Arch} }

// build builds a static binary from this module.
func (p *Platform) build(to, pkg string, flags ...string) error {
	return goCommand(p.goEnvironment(), append(append([]string{"build", "-o", to}, flags...), pkg)...)
}
