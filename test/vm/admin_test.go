//go:build vm

package vm

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// mapped is the kernel's log line about its I/O queues.
func mapped(def, read, polled int) *regexp.Regexp {
	return regexp.MustCompile(fmt.Sprintf(`mapped %d/%d/%d default/read/poll queues`, def, read, polled))
}

// idCtrl is a part of what nvme id-ctrl -o json prints.
type idCtrl struct {
	SN, MN, FR, SubNQN           string
	CMIC, MDTS, CNTLID, Ver      int64
	OAES, KAS, SQES, CQES        int64
	NN, ONCS, FUSES, VWC, MaxCmd int64
	IOCCSZ, IORCSZ, ICDOff       int64
	ANATT, ANACAP, NANAGrpID     int64
	CNTRLType, LPA, SGLs, ACL    int64
	OACS, AERL, ELPE             int64
}

var adminScenarios = []scenario{
	{"nvme-cli reads what the controller says about itself", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		ctrl := h.connect(d.ioAddress(), nqnA, "-i 2")
		dev := h.device(nqnA, 1)
		ng := strings.Replace(dev, "nvme", "ng", 1)
		c := "/dev/" + ctrl

		var id idCtrl
		h.runJSON(&id, "nvme id-ctrl %s -o json", c)
		for _, check := range []struct {
			what string
			ok   bool
			got  any
		}{
			{"SN is not empty", strings.TrimSpace(id.SN) != "", id.SN},
			{"MN is jbofd", strings.TrimSpace(id.MN) == "jbofd", id.MN},
			{"FR is not empty", strings.TrimSpace(id.FR) != "", id.FR},
			{"SUBNQN is the subsystem's", id.SubNQN == nqnA, id.SubNQN},
			{"CMIC: several controllers, ANA", id.CMIC&0xa == 0xa, id.CMIC},
			{"MDTS is 1 MiB in pages of 4 KiB", id.MDTS == 8, id.MDTS},
			{"CNTLID is a valid identifier", id.CNTLID >= 0 && id.CNTLID <= 0xffef, id.CNTLID},
			{"VER is 1.3 or newer", id.Ver >= 0x10300, id.Ver},
			{"OAES: namespace attribute and ANA change", id.OAES&0x900 == 0x900, id.OAES},
			{"KAS is given", id.KAS > 0, id.KAS},
			{"SQES and CQES are 64 and 16 bytes", id.SQES == 0x66 && id.CQES == 0x44,
				fmt.Sprintf("%#x %#x", id.SQES, id.CQES)},
			{"NN is given", id.NN >= 2, id.NN},
			{"ONCS: compare, dataset management, write zeroes, verify", id.ONCS&0x8d == 0x8d, id.ONCS},
			{"FUSES: compare and write", id.FUSES&1 == 1, id.FUSES},
			{"MAXCMD is the queue depth", id.MaxCmd == 128, id.MaxCmd},
			{"IOCCSZ is a command with 8 KiB of data", id.IOCCSZ == (64+8192)/16, id.IOCCSZ},
			{"IORCSZ is a completion", id.IORCSZ == 1, id.IORCSZ},
			{"ICDOFF is 0", id.ICDOff == 0, id.ICDOff},
			{"ANATT and NANAGRPID are given", id.ANATT > 0 && id.NANAGrpID > 0, fmt.Sprint(id.ANATT, id.NANAGrpID)},
			{"CNTRLTYPE is an I/O controller", id.CNTRLType == 1, id.CNTRLType},
			{"SGLS: supported, in capsule", id.SGLs&3 != 0, id.SGLs},
		} {
			if !check.ok {
				h.Errorf("id-ctrl: %s: %v", check.what, check.got)
			}
		}
		var ns struct {
			NSZE, NCAP, NUSE, NMIC, FLBAS, DLFeat, ANAGrpID int64
			NGUID, EUI64                                    string
			LBAFs                                           []struct{ MS, DS, RP int }
		}
		for nsid, want := range map[int]struct{ blocks, shift int64 }{1: {16384, 12}, 2: {131072, 9}} {
			h.runJSON(&ns, "nvme id-ns %s -n %d -o json", c, nsid)
			format := int(ns.FLBAS & 0xf)
			if ns.NSZE != want.blocks || ns.NCAP != want.blocks || ns.NMIC&1 != 1 || ns.ANAGrpID == 0 ||
				format >= len(ns.LBAFs) || int64(ns.LBAFs[format].DS) != want.shift ||
				strings.Trim(ns.NGUID, "0") == "" {
				h.Errorf("id-ns of %d: %+v", nsid, ns)
			}
		}
		h.matches("nvme ns-descs "+dev, `uuid\s*: [0-9a-f-]{36}`, `nguid\s*: [0-9a-f]{32}`, `csi\s*: 0`)
		h.matches("nvme list-ns "+c, `0\]:0x1$`, `1\]:0x2$`)
		h.matches("nvme list-ns "+c+" -a", `0\]:0x1$`, `1\]:0x2$`)
		h.matches("nvme list-subsys", "NQN="+nqnA, ctrl+" tcp traddr=10.0.2.2,.* live")
		h.matches("nvme list", dev, "jbofd")
		h.matches("nvme list -v", ctrl, nqnA)
		h.matches("nvme nvm-id-ctrl "+c, "vsl|wzsl")
		h.matches("nvme cmdset-ind-id-ns "+dev+" -n 1", `nstat\s*: 0x1`)
		h.matches("nvme smart-log "+c, `critical_warning\s*: 0`, `media_errors\s*: 0`)
		h.matches("nvme error-log "+c+" -e 1", "Error Log Entries for device:"+ctrl)
		h.matches("nvme ana-log "+c, `ngrps\s*:\s*[1-9]`, `state\s*:\s*optimized`, `nsid\s*:\s*1$`, `nsid\s*:\s*2$`)
		h.effects(c)
		h.matches("nvme fw-log "+c, `frs1\s*:`)
		h.matches("nvme changed-ns-list-log " + c)
		h.matches("nvme supported-log-pages "+c, "LID")
		for _, f := range []struct{ fid, want string }{
			{"0x6", "Volatile Write Cache"}, {"0x7", "Number of Queues"}, {"0xb", "Async Event Configuration"},
			{"0xe", "Timestamp"}, {"0xf", "Keep Alive Timer"},
		} {
			h.matches("nvme get-feature "+c+" -f "+f.fid, "get-feature:"+strings.Replace(f.fid, "0x", "0x0", 1)+`.*`+
				f.want)
		}
		h.matches("nvme get-feature "+c+" -f 7 -s 3", "Number of Queues")
		h.matches("nvme get-feature "+c+" -f 0xf -s 1", "Keep Alive Timer")
		h.matches("nvme get-property "+c+" --offset=0x0 -H", "Maximum Queue Entries Supported|mqes|MQES")
		h.matches("nvme get-property "+c+" --offset=0x8 -H", "(?i)version|NVMe specification")
		h.matches("nvme get-property "+c+" --offset=0x14 -H", "(?i)Enable.*(Yes|Enabled)|EN")
		h.matches("nvme get-property "+c+" --offset=0x1c -H", "(?i)Ready")
		// nvme-cli 2.3 reads registers that no fabrics controller has; the connection must survive it
		h.try(30e9, "nvme show-regs %s", c)
		h.fails("(?i)Invalid Field", "nvme admin-passthru %s -o 6 --cdw10=0xfe -l 4096 -r", c)
		h.fails("(?i)Invalid Command Opcode", "nvme admin-passthru %s -o 0x7e", c)
		h.fails("(?i)Invalid Log Page|Invalid Field", "nvme get-log %s -i 0xbf -l 512", c)
		h.fails("(?i)Invalid Field", "nvme get-feature %s -f 0xbf", c)
		h.fails("(?i)Invalid Namespace", "nvme id-ns %s -n 4294967294", c)
		h.matches("ls "+ng, ng)
		if s := h.state(ctrl); s != "live" {
			h.Errorf("the controller is %s after all the questions", s)
		}
	}},
	{"Abort of a command that is not there answers that nothing was aborted", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		ctrl := h.connect(d.ioAddress(), nqnA, "")
		r := h.try(30e9, "nvme admin-passthru /dev/%s -o 8 --cdw10=0x7fff0001", ctrl)
		if r.Code != 0 || !strings.Contains(r.Stdout+r.Stderr, "result: 0x00000001") {
			h.Error(r)
		}
	}},
	{"a controller reset comes back with its namespaces", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		ctrl := h.connect(d.ioAddress(), nqnA, "-g -G")
		dev := h.device(nqnA, 1)
		for range 3 {
			h.run("nvme reset /dev/%s", ctrl)
			h.waitLive(ctrl, 10e9)
			h.run("dd if=/dev/urandom of=%s bs=64k count=4 oflag=direct 2>&1", dev)
		}
		h.run("nvme ns-rescan /dev/%s", ctrl)
	}},
	{"NVM commands pass through nvme-cli", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		h.connect(d.ioAddress(), nqnA, "")
		for nsid, sector := range map[int]int{1: 4096, 2: 512} {
			dev := h.device(nqnA, nsid)
			h.run("head -c %d /dev/urandom > /tmp/data; head -c %d /dev/urandom > /tmp/other", 8*sector, 8*sector)
			rw := fmt.Sprintf("-s 16 -c 7 -z %d", 8*sector)
			h.run("nvme write %s %s -d /tmp/data", dev, rw)
			h.run("nvme flush %s", dev)
			h.run("nvme compare %s %s -d /tmp/data", dev, rw)
			h.fails("(?i)Compare Failure", "nvme compare %s %s -d /tmp/other", dev, rw)
			h.run("nvme verify %s -s 16 -c 7", dev)
			h.run("nvme write %s %s -d /tmp/other -f", dev, rw) // FUA
			h.run("nvme read %s %s -d /tmp/back && cmp -n %d /tmp/other /tmp/back", dev, rw, 8*sector)
			h.run("nvme write-zeroes %s -s 18 -c 1", dev)
			h.run("nvme read %s -s 18 -c 1 -z %d -d /tmp/back && cmp -n %d /tmp/back /dev/zero", dev, 2*sector,
				2*sector)
			h.run("nvme read %s -s 16 -c 1 -z %d -d /tmp/back && cmp -n %d /tmp/other /tmp/back", dev, 2*sector,
				2*sector)
			h.run("nvme write-zeroes %s -s 16 -c 7 -d", dev) // with deallocate
			h.run("nvme read %s %s -d /tmp/back && cmp -n %d /tmp/back /dev/zero", dev, rw, 8*sector)
			h.run("nvme write %s %s -d /tmp/data", dev, rw)
			h.run("nvme dsm %s -d -s 16,20 -b 2,4", dev)
			h.run("nvme dsm %s -r -s 0 -b 8", dev) // integral dataset for read: a hint
			h.fails("(?i)LBA Out of Range", "nvme verify %s -s 0x7fffffff -c 7", dev)
			h.fails("(?i)LBA Out of Range", "nvme write-zeroes %s -s 0x7fffffff -c 7", dev)
			h.fails("(?i)LBA Out of Range", "nvme dsm %s -d -s 0x7fffffff -b 8", dev)
			h.fails("(?i)Invalid Command Opcode", "nvme io-passthru %s -o 0x7e --namespace-id=%d", dev, nsid)
		}
	}},
}

// effects checks the log page "commands supported and effects". nvme effects-log of version 2.3 prints nothing for a
// fabrics controller, so the page is read as it is: one word for each opcode, bit 0 says that it is supported, I/O
// commands from byte 1024 on.
func (h *host) effects(ctrl string) {
	h.Helper()
	words := strings.Fields(h.run(`nvme get-log %s -i 5 -l 4096 -b | hexdump -v -e '1/4 "%%08x\n"'`, ctrl))
	if len(words) != 1024 {
		h.Errorf("the effects log has %d words", len(words))
		return
	}
	for name, i := range map[string]int{
		"Get Log Page": 0x02, "Identify": 0x06, "Abort": 0x08, "Set Features": 0x09, "Get Features": 0x0a,
		"Async Event Request": 0x0c, "Keep Alive": 0x18,
		"Flush": 256, "Write": 257, "Read": 258, "Compare": 261, "Write Zeroes": 264, "Dataset Management": 265,
		"Verify": 268,
	} {
		if w, err := strconv.ParseUint(words[i], 16, 32); err != nil || w&1 == 0 {
			h.Errorf("effects log: %s is not supported: %s", name, words[i])
		}
	}
	if w := words[256+0x7e]; w != "00000000" {
		h.Errorf("effects log: opcode 7Eh has effects %s", w)
	}
}
