package nvme

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"jbofd/internal/testutil/wiredump"
	"jbofd/internal/uuid"
)

// TestSettersAndGettersAgree sets all fields of each view in random order to random
// values: every field reads back, and setting one never moves another.
func TestSettersAndGettersAgree(t *testing.T) {
	for name, mk := range views {
		fields := wiredump.Fields(mk())
		keep := fields[:0]
		for _, f := range fields {
			switch name + "." + f.Name {
			case "sqe.NSID", "sqe.NLB", "cqe.Result64", "get-log-sqe.LenBytes":
				continue // share bytes with another, or are 1-based: tested below
			}
			keep = append(keep, f)
		}
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				v := mk()
				want := map[string]any{}
				for _, f := range rapid.Permutation(keep).Draw(t, "order") {
					x := drawValue(t, f, reflect.TypeOf(f.Get(v)))
					f.Set(v, x)
					want[f.Name] = x
				}
				for _, f := range keep {
					if got := f.Get(v); got != want[f.Name] {
						t.Fatalf("%s = %v, was set to %v", f.Name, got, want[f.Name])
					}
				}
			})
		})
	}
}

func drawValue(t *rapid.T, f wiredump.Field, typ reflect.Type) any {
	v := reflect.New(typ).Elem()
	switch typ.Kind() {
	case reflect.Bool:
		v.SetBool(rapid.Bool().Draw(t, f.Name))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		// A count of blocks has 64 bits also where its field is shorter.
		x := rapid.Uint64().Draw(t, f.Name) >> (64 - min(typ.Bits(), 8*f.Len))
		switch f.Name {
		case "Fuse":
			x &= 3
		case "PSDT":
			x &= 3
		case "LSP", "UUIDIndex":
			x &= 0x7f
		case "SEL", "Origin":
			x &= 7
		case "Status":
			x &= 0x7fff
		case "UnixMS":
			x &= MaxTimestampMS
		}
		v.SetUint(x)
	case reflect.String:
		s := rapid.StringMatching(`[!-~]{0,400}`).Draw(t, f.Name)
		if n := len(s); n > f.Len-1 {
			s = s[:f.Len-1]
		}
		v.SetString(s)
	case reflect.Array:
		reflect.Copy(v, reflect.ValueOf(rapid.SliceOfN(rapid.Byte(), typ.Len(), typ.Len()).Draw(t, f.Name)))
	case reflect.Struct:
		v.Set(reflect.ValueOf(Uint128{Lo: rapid.Uint64().Draw(t, "lo"), Hi: rapid.Uint64().Draw(t, "hi")}))
	}
	return v.Interface()
}

func TestNSListHoldsWhatFollows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nsids := ascending(t, 3000)
		after := rapid.Uint32Range(0, 4000).Draw(t, "after")
		var want []uint32
		for _, id := range nsids {
			if id > after && len(want) < MaxNSList {
				want = append(want, id)
			}
		}
		var l NSList
		for i := range l {
			l[i] = 0xff
		}
		if n := l.Fill(after, nsids); n != len(want) {
			t.Fatalf("Fill = %d, want %d", n, len(want))
		}
		var got []uint32
		for id := range l.All() {
			got = append(got, id)
		}
		if !reflect.DeepEqual(got, want) || l.Check() != nil {
			t.Fatalf("got %v, want %v, check %v", got, want, l.Check())
		}
	})
}

func TestControllerListHoldsWhatFollows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var ids, want []uint16
		from := uint16(rapid.Uint32Range(0, 4000).Draw(t, "from"))
		for _, id := range ascending(t, 3000) {
			ids = append(ids, uint16(id))
			if uint16(id) >= from && len(want) < MaxControllerList {
				want = append(want, uint16(id))
			}
		}
		var l ControllerList
		if n := l.Fill(from, ids); n != len(want) || l.Len() != n {
			t.Fatalf("Fill = %d, Len = %d, want %d", n, l.Len(), len(want))
		}
		var got []uint16
		for id := range l.All() {
			got = append(got, id)
		}
		if !reflect.DeepEqual(got, want) || l.Check() != nil {
			t.Fatalf("got %v, want %v, check %v", got, want, l.Check())
		}
	})
}

func ascending(t *rapid.T, most int) (ids []uint32) {
	n := rapid.IntRange(0, most).Draw(t, "n")
	step := rapid.Uint32Range(1, 20).Draw(t, "step")
	for i := range n {
		ids = append(ids, 1+uint32(i)*step)
	}
	return ids
}

func TestANALogReadsBack(t *testing.T) {
	type group struct {
		id    uint32
		chg   uint64
		state ANAState
		nsids []uint32
	}
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 5).Draw(t, "groups")
		b := AppendANAHeader(nil, 42, uint16(n))
		var want []group
		for i := range n {
			g := group{uint32(i + 1), rapid.Uint64().Draw(t, "chg"),
				rapid.SampledFrom([]ANAState{1, 2, 3, 4, 15}).Draw(t, "state"), nil}
			for j := range rapid.IntRange(0, 9).Draw(t, "nsids") {
				g.nsids = append(g.nsids, uint32(j*3+1))
			}
			want = append(want, g)
			b = AppendANAGroup(b, g.id, g.chg, g.state, g.nsids)
		}
		l := ANALog(b)
		if err := l.Check(); err != nil || l.ChangeCount() != 42 {
			t.Fatalf("Check: %v, change count %d", err, l.ChangeCount())
		}
		var got []group
		for g := range l.Groups() {
			x := group{g.ID(), g.ChangeCount(), g.State(), nil}
			for i := range g.Len() {
				x.nsids = append(x.nsids, g.NSID(i))
			}
			got = append(got, x)
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
		for cut := range len(b) {
			if l := ANALog(b[:cut]); l.Check() == nil {
				t.Fatalf("cut at %d of %d: accepted", cut, len(b))
			}
		}
	})
}

func TestNSDescriptorsReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b []byte
		want := map[NIDT][]byte{}
		for _, nt := range rapid.Permutation([]NIDT{NIDTEUI64, NIDTNGUID, NIDTUUID, NIDTCSI, 9}).Draw(t, "types") {
			n := nt.nidLen()
			if n == 0 {
				n = 5
			}
			nid := rapid.SliceOfN(rapid.Byte(), n, n).Draw(t, "nid")
			want[nt] = nid
			b = AppendNSDescriptor(b, nt, nid)
		}
		got := map[NIDT][]byte{}
		d := NSDescriptors(append(b, make([]byte, 100)...))
		for nt, nid := range d.All() {
			got[nt] = nid
		}
		if !reflect.DeepEqual(got, want) || d.Check() != nil {
			t.Fatalf("got %v, want %v, check %v", got, want, d.Check())
		}
	})
}

func TestPropertyBitsKeepToTheirPlaces(t *testing.T) {
	c := CAP(0).WithMQES(127).WithCQR(true).WithTO(15).WithCSS(CAPCSSNVM | CAPCSSIOCS).WithMPSMAX(4).WithNSSRS(
		true).WithCRWMS(true)
	if want := CAP(127 | 1<<16 | 15<<24 | 1<<36 | 1<<37 | 1<<43 | 4<<52 | 1<<59); c != want {
		t.Errorf("CAP = %#x, want %#x", uint64(c), uint64(want))
	}
	if c.MQES() != 127 || !c.CQR() || c.AMS() != 0 || c.TO() != 15 || c.DSTRD() != 0 || !c.NSSRS() ||
		c.CSS() != CAPCSSNVM|CAPCSSIOCS || c.MPSMIN() != 0 || c.MPSMAX() != 4 || !c.CRWMS() || c.CRIMS() {
		t.Errorf("CAP %#x does not read back", uint64(c))
	}
	// What Linux 6.1 writes to enable a controller and to shut it down.
	cc := CC(0).WithEN(true).WithIOSQES(CCIOSQES64).WithIOCQES(CCIOCQES16)
	if cc != 0x460001 || !cc.EN() || cc.IOSQES() != 6 || cc.IOCQES() != 4 || cc.SHN() != SHNNone ||
		cc.CSS() != CCCSSNVM {
		t.Errorf("CC = %#x", uint32(cc))
	}
	if cc := cc.WithSHN(SHNNormal); cc != 0x464001 || cc.SHN() != SHNNormal || cc.WithSHN(SHNNone) != 0x460001 {
		t.Errorf("CC with SHN = %#x", uint32(cc))
	}
	if cc := cc.WithCSS(CCCSSIOCS).WithMPS(3).WithAMS(CCAMSWeight).WithCRIME(true); cc.CSS() != 6 || cc.MPS() != 3 ||
		cc.AMS() != 1 || !cc.CRIME() {
		t.Errorf("CC = %#x", uint32(cc))
	}
	s := CSTSRDY.WithSHST(2)
	if s != CSTSRDY|CSTSSHSTComplete || s.SHST() != 2 || !s.RDY() || s.CFS() || s.WithSHST(0) != CSTSRDY {
		t.Errorf("CSTS = %#x", uint32(s))
	}
	for off, n := range map[uint32]int{PropCAP: 8, PropVS: 4, PropCC: 4, PropCSTS: 4, PropNSSR: 4, 0x04: 0, 0x0c: 0,
		0x24: 0, 0x18: 0} {
		if got := PropertySize(off); got != n {
			t.Errorf("PropertySize(%#x) = %d, want %d", off, got, n)
		}
	}
}

func TestAERResultsAsLinuxReadsThem(t *testing.T) {
	for a, want := range map[AER]uint32{AERNamespaceChanged: 0x040002, AERANAChanged: 0x0c0302,
		AERDiscoveryChanged: 0x70f002} {
		if uint32(a) != want {
			t.Errorf("%#x, want %#x", uint32(a), want)
		}
		if MakeAER(a.Type(), a.Info(), a.LID()) != a {
			t.Errorf("%#x does not read back", uint32(a))
		}
	}
}

func TestNumberOfQueuesIsZeroBased(t *testing.T) {
	if v := NumberOfQueues(64, 32); v != 63|31<<16 {
		t.Errorf("%#x", v)
	}
	if s, c := ParseNumberOfQueues(63 | 31<<16); s != 64 || c != 32 {
		t.Errorf("%d, %d", s, c)
	}
	if s, _ := ParseNumberOfQueues(0xffff); s != 65536 {
		t.Errorf("FFFFh gives %d", s)
	}
}

func TestGetLogLength(t *testing.T) {
	for _, n := range []uint64{4, 4096, 1 << 18, 1<<18 + 4, 1 << 34} {
		g := new(SQE).GetLog()
		g.SetLenBytes(n)
		if g.LenBytes() != n {
			t.Errorf("%d reads back as %d", n, g.LenBytes())
		}
	}
}

func TestSQECountsAreOneBased(t *testing.T) {
	var s SQE
	s.SetNLB(65536)
	if s.NLB() != 65536 || s[48] != 0xff || s[49] != 0xff {
		t.Errorf("NLB = %d, % x", s.NLB(), s[48:50])
	}
	s.SetDSMRanges(256)
	if s.DSMRanges() != 256 || s[40] != 0xff {
		t.Errorf("DSMRanges = %d", s.DSMRanges())
	}
	s.SetCDW(10, 0x01020304)
	if s.CDW(10) != 0x01020304 || !bytes.Equal(s[40:44], []byte{4, 3, 2, 1}) {
		t.Errorf("CDW10: % x", s[40:44])
	}
}

func TestFaultyConnectParameterGoesToTheHost(t *testing.T) {
	for _, c := range []struct {
		f    ConnectFault
		dw0  uint32
		name string
	}{
		{ConnectFault{Offset: ConnectOffQID}, 42, "QID"},
		{ConnectFault{Offset: ConnectOffSQSIZE}, 44, "SQSIZE"},
		{ConnectFault{InData: true, Offset: ConnectDataOffCNTLID}, 1<<16 | 16, "CNTLID"},
		{ConnectFault{InData: true, Offset: ConnectDataOffSUBNQN}, 1<<16 | 256, "SUBNQN"},
		{ConnectFault{InData: true, Offset: ConnectDataOffHOSTNQN}, 1<<16 | 512, "HOSTNQN"},
	} {
		var q CQE
		q.SetConnectInvalid(&c.f)
		got := q.ConnectFault()
		if q.DW0() != c.dw0 || q.Status() != ConnectInvalidParameters|DNR || got.InData != c.f.InData ||
			got.Offset != c.f.Offset {
			t.Errorf("%s: DW0 %#x, status %v, fault %+v", c.name, q.DW0(), q.Status(), got)
		}
		wantError(t, c.name, &got, c.name)
	}
}

func TestChecksNameTheWrongField(t *testing.T) {
	ctrl := func(edit func(*IdentifyController)) error {
		c := examples["identify-controller"]().(*IdentifyController)
		edit(c)
		return c.Check()
	}
	ns := func(edit func(*IdentifyNamespace)) error {
		n := examples["identify-namespace"]().(*IdentifyNamespace)
		edit(n)
		return n.Check()
	}
	entry := func(edit func(*DiscoveryEntry)) error {
		e := examples["discovery-entry"]().(*DiscoveryEntry)
		edit(e)
		return e.Check()
	}
	log := func(edit func(DiscoveryLog) DiscoveryLog) error {
		l := DiscoveryLog(append(wiredump.Bytes(examples["discovery-header"]()),
			wiredump.Bytes(examples["discovery-entry"]())...))
		return edit(l).Check()
	}
	ana := func(edit func(ANALog) ANALog) error { return edit(wiredump.Bytes(examples["ana-log"]())).Check() }
	conn := func(edit func(*ConnectData)) error {
		d := examples["connect-data"]().(*ConnectData)
		edit(d)
		if f := d.Check(); f != nil {
			return f
		}
		return nil
	}
	kv := func(edit func(*IdentifyNamespaceKV)) error {
		n := examples["identify-namespace-kv"]().(*IdentifyNamespaceKV)
		edit(n)
		return n.Check()
	}
	keys := func(edit func(KVList) KVList) error { return edit(wiredump.Bytes(examples["kv-list-data"]())).Check() }
	write := func(opcode uint8, edit func(*KVWriteHeader)) error {
		h := examples["kv-write-header"]().(*KVWriteHeader)
		edit(h)
		return h.Check(opcode)
	}
	desc := func(b ...byte) error { return NSDescriptors(b).Check() }
	for say, err := range map[string]error{
		"SQES":                   ctrl(func(c *IdentifyController) { c.SetSQES(0x55) }),
		"CQES":                   ctrl(func(c *IdentifyController) { c.SetCQES(0x55) }),
		"IOCCSZ":                 ctrl(func(c *IdentifyController) { c.SetIOCCSZ(3) }),
		"IORCSZ":                 ctrl(func(c *IdentifyController) { c.SetIORCSZ(0) }),
		"Controller: SUBNQN":     ctrl(func(c *IdentifyController) { copy(c[768:], strings.Repeat("x", 256)) }),
		"NLBAF":                  ns(func(n *IdentifyNamespace) { n.SetNLBAF(64) }),
		"FLBAS":                  ns(func(n *IdentifyNamespace) { n.SetFLBAS(1) }),
		"LBADS":                  ns(func(n *IdentifyNamespace) { n.SetLBAF(0, MakeLBAFormat(8)) }),
		"NCAP":                   ns(func(n *IdentifyNamespace) { n.SetNCAP(n.NSZE() + 1) }),
		"NUSE":                   ns(func(n *IdentifyNamespace) { n.SetNUSE(n.NCAP() + 1) }),
		"NSZE is 45035":          ns(func(n *IdentifyNamespace) { n.SetNSZE(1 << 52) }),
		"NSZE is 22517":          ns(func(n *IdentifyNamespace) { n.SetNSZE(1 << 51) }), // 2^63 bytes
		"SUBTYPE":                entry(func(e *DiscoveryEntry) { e.SetSUBTYPE(4) }),
		"SUBNQN is unterminated": entry(func(e *DiscoveryEntry) { e.SetSubNQN(strings.Repeat("x", 255)) }),
		"NQN is empty":           entry(func(e *DiscoveryEntry) { e.SetSubNQN("") }),
		"TRADDR":                 entry(func(e *DiscoveryEntry) { e[512] = 7 }),
		"TRSVCID":                entry(func(e *DiscoveryEntry) { e[32] = 0x80 }),
		"NUMREC":                 log(func(l DiscoveryLog) DiscoveryLog { return l[:len(l)-1] }),
		"RECFMT":                 log(func(l DiscoveryLog) DiscoveryLog { l.Header().SetRECFMT(1); return l }),
		"length":                 log(func(l DiscoveryLog) DiscoveryLog { return l[:1023] }),
		"ANAGRPID":               ana(func(l ANALog) ANALog { l[16] = 0; return l }),
		"ANA state":              ana(func(l ANALog) ANALog { l[32] = 5; return l }),
		"NSID":                   ana(func(l ANALog) ANALog { l[48] = 9; return l }),
		"number of groups":       ana(func(l ANALog) ANALog { l[20] = 0xff; return l }),
		"HOSTNQN":                conn(func(d *ConnectData) { d.SetHostNQN("") }),
		"SUBNQN: ":               conn(func(d *ConnectData) { d.SetSubNQN("\xff") }),
		"within 223 bytes":       conn(func(d *ConnectData) { d.SetSubNQN(strings.Repeat("x", 224)) }),
		"NIDL is 7":              desc(1, 7, 0, 0, 1, 2, 3, 4, 5, 6, 7),
		"within the list":        desc(2, 16, 0, 0, 1),
		"once in the list":       desc(4, 1, 0, 0, 0, 4, 1, 0, 0, 0),
		"ACRE":                   (&HostBehavior{2}).Check(),
		"controller list: count": (&ControllerList{0, 8}).Check(),
		"CNTLID":                 (&ControllerList{2, 0, 5, 0, 5, 0}).Check(),
		"NKVF":                   kv(func(n *IdentifyNamespaceKV) { n.SetNKVF(16) }),
		"KVFC":                   kv(func(n *IdentifyNamespaceKV) { n.SetKVFC(1) }),
		"KVKML is 0":             kv(func(n *IdentifyNamespaceKV) { n.SetKVF(0, KVFormat{}) }),
		"KVKML is 17":            kv(func(n *IdentifyNamespaceKV) { n.SetKVF(0, KVFormat{17}) }),
		"KV list: length is 3":   keys(func(l KVList) KVList { return l[:3] }),
		"NRK is 5":               keys(func(l KVList) KVList { l[0] = 5; return l }),
		"KL is 0":                keys(func(l KVList) KVList { l[4] = 0; return l }),
		"KL is 17":               keys(func(l KVList) KVList { l[4] = 17; return l }),
		"KL is 16":               keys(func(l KVList) KVList { return l[:len(l)-3] }),
		"Condition is 5":         write(CmdKVXStore, func(h *KVWriteHeader) { h.SetCondition(5) }),
		"Condition is 1":         write(CmdKVXDelete, func(h *KVWriteHeader) { h.SetCondition(KVIfAbsent) }),
		"Condition is 2":         write(CmdKVXDelete, func(h *KVWriteHeader) { h.SetCondition(KVIfPresent) }),
		"Flags is 8":             write(CmdKVXStore, func(h *KVWriteHeader) { h.SetFlags(8) }),
		"Flags is 1":             write(CmdKVXStore, func(h *KVWriteHeader) { h.SetFlags(KVTombstone) }),
		"Flags is 2": write(CmdKVXStore, func(h *KVWriteHeader) {
			h.SetFlags(KVRetry)
			h.SetClient(0)
		}),
		"Flags is 4":     write(CmdKVXStore, func(h *KVWriteHeader) { h.SetExpires(0) }),
		"Version is 471": write(CmdKVXStore, func(h *KVWriteHeader) { h.SetCondition(KVIfPresent) }),
		"Version is 0": write(CmdKVXStore, func(h *KVWriteHeader) {
			h.SetCondition(KVIfNewer)
			h.SetVersion(0)
		}),
		"Version is 4611686018427387904": write(CmdKVXStore, func(h *KVWriteHeader) {
			h.SetCondition(KVIfNewer)
			h.SetVersion(MaxKVVersion + 1)
		}),
		"Sequence is 5":          write(CmdKVXStore, func(h *KVWriteHeader) { h.SetClient(0) }),
		"Expires is 3600":        write(CmdKVXDelete, func(h *KVWriteHeader) { h.SetFlags(0) }),
		"Keep is 0":              write(CmdKVXStore, func(h *KVWriteHeader) { h.SetKeep(0) }),
		"Keep is 3601":           write(CmdKVXStore, func(h *KVWriteHeader) { h.SetKeep(3601) }),
		"write header: reserved": write(CmdKVXStore, func(h *KVWriteHeader) { h[34] = 1 }),
		"reserved byte is 7":     write(CmdKVXStore, func(h *KVWriteHeader) { h[39] = 7 }),
		"Answered is 6":          write(CmdKVXStore, func(h *KVWriteHeader) { h.SetAnswered(6) }),
		"read header: reserved":  (&KVReadHeader{12: 1}).Check(),
		"namespace list":         (&NSList{2, 0, 0, 0, 1}).Check(),
	} {
		wantError(t, say, err, say)
	}
}

func TestNQNsAsLinuxAcceptsThem(t *testing.T) {
	for _, s := range []string{subNQN, hostNQN, DiscoveryNQN, "x", "nqn.with spaces and ünïcode",
		strings.Repeat("x", 223)} {
		if err := CheckNQN(s); err != nil {
			t.Errorf("%q: %v", s, err)
		}
	}
	wantError(t, "empty", CheckNQN(""), "1 to 223")
	wantError(t, "long", CheckNQN(strings.Repeat("x", 224)), "224 bytes")
	wantError(t, "not UTF-8", CheckNQN("nqn.\xff"), "UTF-8")
	wantError(t, "NUL", CheckNQN("nqn.\x00"), "NUL")
}

func TestUUIDText(t *testing.T) {
	const s = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
	for _, in := range []string{s, strings.ToUpper(s), strings.ReplaceAll(s, "-", "")} {
		u, err := uuid.Parse(in)
		if err != nil || u != hostID || u.String() != s || u.IsZero() {
			t.Errorf("%q: %v, %v", in, u, err)
		}
	}
	for _, in := range []string{"", s[1:], s + "0", strings.Replace(s, "1", "g", 1),
		"1b4e28b-a2fa1-11d2-883f-0016d3cca427"} {
		if u, err := uuid.Parse(in); err == nil {
			t.Errorf("%q: accepted as %v", in, u)
		}
	}
}

func TestASCIIFieldsArePaddedCutAndClean(t *testing.T) {
	var c IdentifyController
	c.SetSN("a\x01b\xff\u00e9")
	if c.SN() != "a?b???" || c[23] != ' ' {
		t.Errorf("SN = %q, % x", c.SN(), c[4:24])
	}
	c.SetFR("123456789")
	if c.FR() != "12345678" {
		t.Errorf("FR = %q", c.FR())
	}
	copy(c[4:24], "padded with NUL\x00\x00\x00\x00\x00")
	if c.SN() != "padded with NUL" {
		t.Errorf("SN = %q", c.SN())
	}
}

func TestExtensionIsAnnouncedOnlyWithItsMagic(t *testing.T) {
	var c IdentifyController
	if _, _, ok := c.Extension(); ok {
		t.Error("zeroes announce extensions")
	}
	c.SetExtension(ExtVersion, ExtCredits)
	if v, bits, ok := c.Extension(); !ok || v != ExtVersion || bits != ExtCredits || string(c[3072:3076]) != "JBOF" {
		t.Errorf("%d, %#x, %t", v, bits, ok)
	}
}

func TestUint128Carries(t *testing.T) {
	if u := U128(1 << 63).Add(1 << 63); u != (Uint128{Hi: 1}) || u.Uint64() != 1<<64-1 {
		t.Errorf("%v", u)
	}
}

func TestTooManyChangedNamespacesBecomeOneMark(t *testing.T) {
	ids := make([]uint32, 1025)
	for i := range ids {
		ids[i] = uint32(i + 1)
	}
	var l NSList
	l.FillChanged(ids)
	n := 0
	for id := range l.All() {
		if n++; id != NSIDBroadcast {
			t.Fatalf("NSID %d", id)
		}
	}
	if n != 1 {
		t.Errorf("%d NSIDs", n)
	}
}

func TestStatusNamesAreComplete(t *testing.T) {
	s := ConnectInvalidParameters | DNR
	if got, want := s.String(), "Connect Invalid Parameters (sct 0x1, sc 0x82, DNR)"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if s.SCT() != SCTCommand || s.SC() != 0x82 || !s.DNR() || s.OK() || s.Code() != ConnectInvalidParameters {
		t.Errorf("%#x", uint16(s))
	}
	if !(Success | More).OK() {
		t.Error("Success with More is not OK")
	}
}
