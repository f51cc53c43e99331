package nvme

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/internal/testutil/wiredump"
	"jbofd/internal/uuid"
)

// views are all fixed-size structures with setters; layouts and round trips are tested for
// each.
var views = map[string]func() any{
	"sqe":                            func() any { return new(SQE) },
	"sgl":                            func() any { return new(SGL) },
	"cqe":                            func() any { return new(CQE) },
	"connect-sqe":                    func() any { return new(ConnectSQE) },
	"connect-data":                   func() any { return new(ConnectData) },
	"property-sqe":                   func() any { return new(PropertySQE) },
	"identify-sqe":                   func() any { return new(IdentifySQE) },
	"get-log-sqe":                    func() any { return new(GetLogSQE) },
	"features-sqe":                   func() any { return new(FeaturesSQE) },
	"abort-sqe":                      func() any { return new(AbortSQE) },
	"identify-controller":            func() any { return new(IdentifyController) },
	"identify-namespace":             func() any { return new(IdentifyNamespace) },
	"identify-namespace-independent": func() any { return new(IdentifyNamespaceIndependent) },
	"identify-controller-nvm":        func() any { return new(IdentifyControllerNVM) },
	"identify-namespace-nvm":         func() any { return new(IdentifyNamespaceNVM) },
	"error-log-entry":                func() any { return new(ErrorLogEntry) },
	"smart-log":                      func() any { return new(SMARTLog) },
	"firmware-slot-log":              func() any { return new(FirmwareSlotLog) },
	"discovery-header":               func() any { return new(DiscoveryHeader) },
	"discovery-entry":                func() any { return new(DiscoveryEntry) },
	"timestamp":                      func() any { return new(Timestamp) },
	"host-behavior":                  func() any { return new(HostBehavior) },
	"dsm-range":                      func() any { return new(DSMRange) },
	"kv-sqe":                         func() any { return new(KVSQE) },
	"identify-namespace-kv":          func() any { return new(IdentifyNamespaceKV) },
	"kv-format":                      func() any { return new(KVFormat) },
	"kv-write-header":                func() any { return new(KVWriteHeader) },
	"kv-read-header":                 func() any { return new(KVReadHeader) },
	"kv-forward-header":              func() any { return new(KVForwardHeader) },
}

const (
	hostNQN = "nqn.2014-08.org.nvmexpress:uuid:1b4e28ba-2fa1-11d2-883f-0016d3cca427"
	subNQN  = "nqn.2026-11.example.jbofd:blocks"
)

var hostID = uuid.UUID{0x1b, 0x4e, 0x28, 0xba, 0x2f, 0xa1, 0x11, 0xd2, 0x88, 0x3f, 0x00, 0x16, 0xd3, 0xcc, 0xa4, 0x27}

// examples are structures as jbofd and its hosts fill them; fuzzers start from them.
var examples = map[string]func() any{
	"connect-sqe": func() any {
		c := new(SQE).Connect()
		c.Init()
		(*SQE)(c).SGL().SetType(SGLTypeDataBlock, SGLSubtypeOffset)
		(*SQE)(c).SGL().SetLength(ConnectDataSize)
		c.SetQID(3)
		c.SetSQSIZE(127)
		c.SetCATTR(CATTRDisableSQFlow)
		c.SetKATO(15000)
		return c
	},
	"connect-data": func() any {
		d := new(ConnectData)
		d.SetHostID(hostID)
		d.SetCNTLID(CNTLIDDynamic)
		d.SetSubNQN(subNQN)
		d.SetHostNQN(hostNQN)
		return d
	},
	"connect-invalid": func() any {
		c := new(CQE)
		c.SetConnectInvalid(&ConnectFault{InData: true, Offset: ConnectDataOffSUBNQN})
		return c
	},
	"property-get-cap": func() any {
		p := new(SQE).Property()
		p.Init(FabricsPropertyGet, PropCAP)
		return p
	},
	"property-set-cc": func() any {
		p := new(SQE).Property()
		p.Init(FabricsPropertySet, PropCC)
		p.SetVALUE(uint64(CC(0).WithEN(true).WithIOSQES(CCIOSQES64).WithIOCQES(CCIOCQES16)))
		return p
	},
	"get-log-sqe": func() any {
		s := new(SQE)
		s.SetOpcode(AdminGetLogPage)
		g := s.GetLog()
		g.SetLID(LIDDiscovery)
		g.SetRAE(true)
		g.SetLenBytes(1 << 20)
		g.SetLPO(1024)
		return g
	},
	"identify-controller": func() any {
		c := new(IdentifyController)
		c.SetSN("JBOF0123456789")
		c.SetMN("jbofd")
		c.SetFR("0.1")
		c.SetCMIC(CMICMultiPort | CMICMultiController | CMICANA)
		c.SetMDTS(8)
		c.SetCNTLID(1)
		c.SetVER(Version2_0)
		c.SetOAES(AECNamespace | AECANA)
		c.SetCTRATT(CTRATTHostID128 | CTRATTTBKAS)
		c.SetCNTRLTYPE(CNTRLTYPEIO)
		c.SetACL(3)
		c.SetAERL(3)
		c.SetLPA(LPASMARTPerNS | LPAEffects | LPAExtended)
		c.SetKAS(10)
		c.SetTNVMCAP(U128(1 << 40))
		c.SetANATT(10)
		c.SetANACAP(ANACAPOptimized)
		c.SetANAGRPMAX(1)
		c.SetNANAGRPID(1)
		c.SetSQES(0x66)
		c.SetCQES(0x44)
		c.SetMAXCMD(128)
		c.SetNN(1024)
		c.SetONCS(ONCSCompare | ONCSDSM | ONCSWriteZeroes | ONCSVerify)
		c.SetFUSES(FUSESCompareAndWrite)
		c.SetVWC(VWCPresent | VWCFlushNSIDAll)
		c.SetSGLS(SGLSSupported | SGLSOffset | SGLSTransportData)
		c.SetSubNQN(subNQN)
		c.SetIOCCSZ((SQESize + 8192) / 16)
		c.SetIORCSZ(CQESize / 16)
		c.SetMSDBD(1)
		c.SetOFCS(OFCSDisconnect)
		c.SetExtension(ExtVersion, ExtCredits|ExtKV)
		return c
	},
	"identify-namespace": func() any {
		n := new(IdentifyNamespace)
		n.SetNSZE(1 << 18)
		n.SetNCAP(1 << 18)
		n.SetNUSE(1 << 10)
		n.SetNSFEAT(NSFEATNoReuse)
		n.SetNMIC(NMICShared)
		n.SetDLFEAT(DLFEATReadZeroes | DLFEATWriteZeroes)
		n.SetNVMCAP(U128(1 << 30))
		n.SetANAGRPID(1)
		n.SetNGUID(hostID)
		n.SetEUI64([8]byte{1, 2, 3, 4, 5, 6, 7, 8})
		n.SetLBAF(0, MakeLBAFormat(12))
		n.SetSSD(2)
		return n
	},
	"smart-log": func() any {
		l := new(SMARTLog)
		l.SetTemperature(310)
		l.SetAvailableSpare(100)
		l.SetAvailableSpareThreshold(10)
		l.SetDataUnitsRead(Uint128{Lo: 7, Hi: 1})
		l.SetHostWrites(U128(12345))
		l.SetTemperatureSensor(1, 311)
		return l
	},
	"error-log-entry": func() any {
		e := new(ErrorLogEntry)
		e.SetErrorCount(9)
		e.SetSQID(1)
		e.SetCID(0x1234)
		e.SetStatus(UnrecoveredReadError | DNR)
		e.SetParamLocation(NoParamLocation)
		e.SetLBA(4096)
		e.SetNSID(1)
		e.SetTRTYPE(TRTYPETCP)
		return e
	},
	"firmware-slot-log": func() any {
		l := new(FirmwareSlotLog)
		l.SetAFI(1)
		l.SetFRS(1, "0.1")
		return l
	},
	"discovery-header": func() any {
		h := new(DiscoveryHeader)
		h.SetGENCTR(5)
		h.SetNUMREC(1)
		return h
	},
	"discovery-entry": func() any {
		e := new(DiscoveryEntry)
		e.SetTRTYPE(TRTYPETCP)
		e.SetADRFAM(ADRFAMIPv4)
		e.SetSUBTYPE(SUBTYPENVM)
		e.SetTREQ(TREQSecureNotRequired | TREQDisableSQFlow)
		e.SetPORTID(1)
		e.SetCNTLID(CNTLIDDynamic)
		e.SetASQSZ(MinASQSZ)
		e.SetEFLAGS(DiscoveryEflagEPCSD)
		e.SetTRSVCID("4420")
		e.SetSubNQN(subNQN)
		e.SetTRADDR("192.0.2.7")
		return e
	},
	"timestamp": func() any {
		t := new(Timestamp)
		t.SetUnixMS(1_700_000_000_123)
		t.SetOrigin(TimestampFromHost)
		return t
	},
	"ana-log": func() any {
		b := AppendANAHeader(nil, 3, 2)
		b = AppendANAGroup(b, 1, 3, ANAStateOptimized, []uint32{1, 2, 7})
		b = AppendANAGroup(b, 2, 1, ANAStateInaccessible, nil)
		return (*[ANAHeaderSize + 2*ANAGroupSize + 12]byte)(b)
	},
	"namespace-descriptors": func() any {
		b := AppendNSDescriptor(nil, NIDTEUI64, []byte{1, 2, 3, 4, 5, 6, 7, 8})
		b = AppendNSDescriptor(b, NIDTNGUID, hostID[:])
		b = AppendNSDescriptor(b, NIDTUUID, hostID[:])
		b = AppendNSDescriptor(b, NIDTCSI, []byte{0})
		return (*[4*4 + 8 + 16 + 16 + 1]byte)(b)
	},
	"namespace-list": func() any {
		l := new(NSList)
		l.Fill(1, []uint32{1, 2, 3, 70000})
		return l
	},
	"controller-list": func() any {
		l := new(ControllerList)
		l.Fill(2, []uint16{1, 2, 3, 0xff00})
		return l
	},
	"io-command-sets": func() any {
		v := new(IOCommandSets)
		v.SetCombination(0, CSINVM)
		v.SetCombination(1, CSINVM, CSIKV)
		return v
	},
	"kv-store": func() any {
		k := kvCommand(CmdKVStore, "user4711:mail:77")
		k.SetLenBytes(256)
		k.SetOptions(KVStoreMustNotExist)
		return k
	},
	"kv-retrieve": func() any {
		k := kvCommand(CmdKVRetrieve, "user4711")
		k.SetLenBytes(4096)
		return k
	},
	"kv-list": func() any {
		k := kvCommand(CmdKVList, "")
		k.SetLenBytes(64 << 10)
		return k
	},
	"kv-delete": func() any { return kvCommand(CmdKVDelete, "a") },
	"kv-exist":  func() any { return kvCommand(CmdKVExist, "user4711:m") },
	"kv-list-data": func() any {
		l := NewKVList(make([]byte, 256))
		for _, key := range []string{"a", "user4711", "user4711:m", "user4711:mail:77"} {
			l, _ = l.Append([]byte(key))
		}
		return (*[4 + 4 + 12 + 12 + 20]byte)(l)
	},
	"kvx-store": func() any {
		k := kvCommand(CmdKVXStore, "user4711:mail:77")
		k.SetLenBytes(KVWriteHeaderSize + 256)
		return k
	},
	"kv-write-header": func() any {
		h := new(KVWriteHeader)
		h.SetCondition(KVIfVersion)
		h.SetVersion(4711)
		h.SetExpires(3600)
		h.SetFlags(KVRelative)
		h.SetClient(0x1122334455667788)
		h.SetAnswered(4)
		h.SetSequence(5)
		h.SetKeep(120)
		return h
	},
	"kv-write-header-delete": func() any {
		h := new(KVWriteHeader)
		h.SetExpires(1796000000)
		h.SetFlags(KVTombstone | KVRetry)
		h.SetClient(0x1122334455667788)
		h.SetSequence(6)
		h.SetKeep(MaxKVKeep)
		return h
	},
	"kv-read-header": func() any {
		h := new(KVReadHeader)
		h.SetVersion(4712)
		h.SetExpires(1796000000)
		return h
	},
	"kv-forward-header": func() any {
		h := new(KVForwardHeader)
		h.SetVersion(1<<40 + 5)
		h.SetClient(0x1122334455667788)
		h.SetSequence(9)
		h.SetKeepUntil(1796000000)
		h.SetKey([MaxKVKey]byte{'a', 'b', 'c'})
		return h
	},
	"kvx-store-completion": func() any {
		c := new(CQE)
		c.SetResult64(4712)
		c.SetSQID(17)
		c.SetCID(9)
		return c
	},
	"identify-namespace-kv": func() any {
		n := new(IdentifyNamespaceKV)
		n.SetNSZE(4 << 30)
		n.SetNUSE(1 << 20)
		n.SetNSFEAT(NSFEATNoReuse)
		n.SetNMIC(NMICShared)
		n.SetNOVG(512)
		n.SetANAGRPID(1)
		n.SetNGUID(hostID)
		n.SetEUI64([8]byte{1, 2, 3, 4, 5, 6, 7, 8})
		var f KVFormat
		f.SetKVKML(MaxKVKey)
		f.SetKVVML(1 << 20)
		n.SetKVF(0, f)
		n.SetSSD(2)
		return n
	},
	"kv-format": func() any {
		f := new(KVFormat)
		f.SetKVKML(MaxKVKey)
		f.SetKVVML(1 << 20)
		f.SetMNKS(1 << 24)
		return f
	},
	"effects-log": func() any {
		l := new(EffectsLog)
		l.SetAdmin(AdminIdentify, EffectSupported)
		l.SetIO(CmdWrite, EffectSupported|EffectLBCC)
		return l
	},
	"supported-log-pages": func() any {
		l := new(SupportedLogPages)
		l.SetLID(LIDANA, LIDSupportedBit)
		return l
	},
}

func kvCommand(opcode uint8, key string) *KVSQE {
	s := new(SQE)
	s.SetOpcode(opcode)
	s.SetNSID(2)
	s.KV().SetKey([]byte(key))
	return s.KV()
}

// TestLayout compares each field's place with testdata/layout, which was compared with
// offsetof of libnvme's and SPDK's structures. Regenerate with -rewrite, and understand the diff:
// a place never changes, fields are only added.
func TestLayout(t *testing.T) {
	datadriven.RunTest(t, "testdata/layout", func(t *testing.T, d *datadriven.TestData) string {
		mk := views[d.Cmd]
		if mk == nil {
			d.Fatalf(t, "no view %q", d.Cmd)
		}
		return wiredump.Layout(mk())
	})
}

// TestGolden compares examples with annotated dumps in testdata/golden. Regenerate with -rewrite.
func TestGolden(t *testing.T) {
	datadriven.RunTest(t, "testdata/golden", func(t *testing.T, d *datadriven.TestData) string {
		mk := examples[d.Cmd]
		if mk == nil {
			d.Fatalf(t, "no example %q", d.Cmd)
		}
		return wiredump.Dump(mk())
	})
}

func TestEveryViewAndExampleHasItsGoldenFile(t *testing.T) {
	for file, names := range map[string][]string{"testdata/layout": keys(views), "testdata/golden": keys(examples)} {
		seen := map[string]bool{}
		datadriven.RunTest(t, file, func(t *testing.T, d *datadriven.TestData) string {
			seen[d.Cmd] = true
			return d.Expected
		})
		for _, n := range names {
			if !seen[n] {
				t.Errorf("%s: no %q", file, n)
			}
		}
	}
}

func keys[V any](m map[string]V) (out []string) {
	for k := range m {
		out = append(out, k)
	}
	return out
}

// TestFieldsDoNotOverlap holds for all views but those whose accessors deliberately
// read the same bytes twice.
func TestFieldsDoNotOverlap(t *testing.T) {
	shared := map[string]bool{
		"sqe": true, // NSID and FCTYPE; SLBA and DSMRanges
		"cqe": true, // DW0, DW1 and Result64
	}
	for name, mk := range views {
		if shared[name] {
			continue
		}
		owner := map[string]string{}
		for _, f := range wiredump.Fields(mk()) {
			for i, m := range f.Bits {
				for bit := range 8 {
					if m>>bit&1 == 0 {
						continue
					}
					at := fmt.Sprintf("%d.%d", f.Off+i, bit)
					if o := owner[at]; o != "" {
						t.Fatalf("%s: %s and %s both hold byte.bit %s", name, o, f.Name, at)
					}
					owner[at] = f.Name
				}
			}
		}
	}
}

func TestSizes(t *testing.T) {
	for _, c := range []struct {
		v    any
		size int
	}{
		{SQE{}, 64}, {CQE{}, 16}, {SGL{}, 16}, {ConnectData{}, 1024},
		{IdentifyController{}, 4096}, {IdentifyNamespace{}, 4096}, {IdentifyNamespaceIndependent{}, 4096},
		{IdentifyControllerNVM{}, 4096}, {IdentifyNamespaceNVM{}, 4096}, {NSList{}, 4096}, {ControllerList{}, 4096},
		{IOCommandSets{}, 4096}, {SupportedLogPages{}, 1024}, {ErrorLogEntry{}, 64}, {SMARTLog{}, 512},
		{FirmwareSlotLog{}, 512}, {EffectsLog{}, 4096}, {DiscoveryHeader{}, 1024}, {DiscoveryEntry{}, 1024},
		{HostBehavior{}, 512}, {Timestamp{}, 8}, {DSMRange{}, 16}, {KVSQE{}, 64}, {IdentifyNamespaceKV{}, 4096},
		{KVFormat{}, 16}, {KVWriteHeader{}, 48}, {KVReadHeader{}, 16}, {KVForwardHeader{}, 48},
	} {
		if n := reflect.TypeOf(c.v).Len(); n != c.size {
			t.Errorf("%T has %d bytes, want %d", c.v, n, c.size)
		}
	}
}

func TestExamplesPassTheirChecks(t *testing.T) {
	for name, mk := range examples {
		v := mk()
		var err error
		switch v := v.(type) {
		case interface{ Check() error }:
			err = v.Check()
		case *KVWriteHeader:
			if err = v.Check(CmdKVXStore); v.Flags()&KVTombstone != 0 {
				err = v.Check(CmdKVXDelete)
			}
		case *KVForwardHeader:
			err = v.Check(3)
		case *ConnectData:
			if f := v.Check(); f != nil {
				err = f
			}
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := ANALog(wiredump.Bytes(examples["ana-log"]())).Check(); err != nil {
		t.Error(err)
	}
	if err := KVList(wiredump.Bytes(examples["kv-list-data"]())).Check(); err != nil {
		t.Error(err)
	}
	if err := NSDescriptors(wiredump.Bytes(examples["namespace-descriptors"]())).Check(); err != nil {
		t.Error(err)
	}
	log := DiscoveryLog(append(wiredump.Bytes(examples["discovery-header"]()),
		wiredump.Bytes(examples["discovery-entry"]())...))
	if err := log.Check(); err != nil {
		t.Error(err)
	}
}

func wantError(t *testing.T, what string, err error, say string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: accepted", what)
	} else if !strings.Contains(err.Error(), say) {
		t.Errorf("%s: error %q does not name %q", what, err, say)
	}
}
