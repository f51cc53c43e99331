package lint

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// TestThisModuleObeysTheRules applies every rule to this module.
func TestThisModuleObeysTheRules(t *testing.T) {
	tree, err := Load(os.DirFS("../.."))
	if err != nil {
		t.Fatal(err)
	}
	if tree.Modules["."] == nil || len(tree.Packages) < 3 {
		t.Fatalf("found %d packages and no go.mod: not the module's root", len(tree.Packages))
	}
	for _, f := range Check(tree) {
		t.Error(f)
	}
}

// TestMakefileRacesAllPackagesButThePureOnes: PURE in the Makefile names the pure packages that exist.
func TestMakefileRacesAllPackagesButThePureOnes(t *testing.T) {
	out, err := exec.Command("make", "-s", "-C", "../..", "--eval", "pure:; @printf '%s\\n' $(PURE)", "pure").Output()
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, dir := range pure {
		if _, err := os.Stat("../../" + dir); err == nil {
			want = append(want, "./"+dir)
		}
	}
	got := strings.Fields(string(out))
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the Makefile has\n%q, want\n%q", got, want)
	}
}

// clean is a small module that breaks no rule.
var clean = map[string]string{
	"go.mod": "module jbofd\n\ngo 1.26.0\n\nrequire (\n" +
		"\tgolang.org/x/sys v0.49.0\n\tpgregory.net/rapid v1.3.0 // indirect\n)\n",
	"internal/nvme/nvme.go": `// Package nvme holds formats.
package nvme

import "time"

// SQE is an entry.
type SQE [64]byte

func (s *SQE) Opcode() uint8 { return s[0] }

// Patience is how long to wait.
const Patience = 3 * time.Second
`,
	"internal/nvme/nvme_test.go": `package nvme

import (
	"os"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestX(t *testing.T) { _, _, _, _ = os.Args, sync.Mutex{}, time.Now, rapid.Check }
`,
	"internal/nvmeof/nvmeof.go": `// Package nvmeof holds machines.
package nvmeof

import (
	"net/netip"

	"jbofd/internal/invariants"
	"jbofd/internal/nvme"
)

// Addr is one.
type Addr struct {
	A netip.Addr
	S nvme.SQE
	I invariants.T
}

type hidden struct{}

func (hidden) Exported() {}
`,
	"internal/invariants/invariants.go": "// Package invariants checks.\npackage invariants\n\n// T is one.\ntype T " +
		"struct{}\n\nfunc (T) String() string { return \"\" }\n",
	"internal/nvme/names.go": `package nvme

// a, b are a pair.
var a, b = 1, 2

// c's value. A comment may begin with the name, its genitive, or a word.
func c() {}

// NVMe/TCP has digests.
func d() {}

// NVMe has queues.
func e() {}

// hot: 0 allocs
func g() {}
`,
	"internal/nvme/wide.go": "package nvme\n\n// " + strings.Repeat("é", maxLineColumns-3) + "\n\nconst text = `\n" +
		strings.Repeat("x", 2*maxLineColumns) + "`\n",
	"internal/bufpool/addr_unsafe.go": "// Package bufpool pools.\npackage bufpool\n\nimport _ \"unsafe\"\n",
	"internal/ssd/spdk/spdk_cgo.go":   "//go:build spdk\n\n// Package spdk binds.\npackage spdk\n\nimport \"C\"\n",
	"internal/testutil/x/x.go": "// Package x helps tests.\npackage x\n\nimport _ " +
		"\"github.com/cockroachdb/datadriven\"\n",
	"test/bench/go.mod": "module bench\n\nrequire github.com/cockroachdb/pebble v2.0.0\n",
	"test/bench/bench.go": "// Command bench compares.\npackage main\n\nimport _ " +
		"\"github.com/cockroachdb/pebble\"\n",
	"internal/nvme/testdata/broken.go": "not Go",
	"test/vm/.cache/broken.go":         "not Go",
}

// TestEachRuleFindsItsPlantedFault plants one fault at a time in a clean module: its rule,
// and no other, must find it and say what to do.
func TestEachRuleFindsItsPlantedFault(t *testing.T) {
	big := strings.Repeat("\tf()\n", maxFileLines)
	faults := []struct {
		rule, path, src, say string
	}{
		{"parse", "internal/nvme/x.go", "package nvme\n\nfunc {\n", "expected"},
		{"gofmt", "internal/nvme/x.go", "package nvme\n\nvar  x = 1\n", "gofmt -w internal/nvme/x.go"},
		{"pure", "internal/nvme/x.go", "package nvme\n\nimport _ \"os\"\n", `must not import "os"`},
		{"pure", "internal/nvme/x.go", "package nvme\n\nimport _ \"os/signal\"\n", `"os/signal"`},
		{"pure", "internal/nvmeof/x.go", "package nvmeof\n\nimport _ \"net\"\n", "declare an interface"},
		{"pure", "internal/nvmeof/tcp/pdu/x.go", "// Package pdu is.\npackage pdu\n\nimport _ \"sync/atomic\"\n",
			`"sync/atomic"`},
		{"pure", "internal/nvmeof/tcp/x.go", "// Package tcp is.\npackage tcp\n\nimport _ \"sync\"\n", `"sync"`},
		{"pure", "internal/drr/x.go", "// Package drr is.\npackage drr\n\nimport _ \"math/rand/v2\"\n", "a seed"},
		{"pure", "internal/kvstore/x.go", "// Package kvstore is.\npackage kvstore\n\nimport _ " +
			"\"golang.org/x/sys/unix\"\n", "pure"},
		{"time", "internal/nvme/x.go", "package nvme\n\nimport \"time\"\n\nvar x = time.Now\n", "time.Now"},
		{"time", "internal/nvme/x.go", "package nvme\n\nimport clock \"time\"\n\nvar x clock.Time\n", "time.Time"},
		{"time", "internal/nvme/x.go", "package nvme\n\nimport . \"time\"\n\nvar x Time\n", "dot-import"},
		{"goroutine", "internal/nvmeof/x.go", "package nvmeof\n\nfunc x() { go x() }\n", "return an action"},
		{"goroutine", "internal/nvmeof/x.go", "package nvmeof\n\ntype x chan int\n", "caller's slice"},
		{"cgo", "internal/bufpool/x.go", "package bufpool\n\nimport \"C\"\n", "rdma/verbs"},
		{"cgo", "internal/ssd/spdk/x.go", "package spdk\n\nimport \"C\"\n", "//go:build spdk"},
		{"unsafe", "internal/bufpool/x.go", "package bufpool\n\nimport _ \"unsafe\"\n", "x_unsafe.go"},
		{"unsafe", "internal/bufpool/x_test.go", "package bufpool\n\nimport _ \"unsafe\"\n", "x_unsafe.go"},
		{"direction", "internal/daemon/x.go", "// Package daemon is.\npackage daemon\n\nimport _ " +
			"\"jbofd/internal/lab/node\"\n", "for tests and"},
		{"direction", "internal/nvme/x.go", "package nvme\n\nimport _ \"jbofd/internal/nvmeof\"\n",
			"a format package imports no other package"},
		{"direction", "internal/nvmeof/x.go", "package nvmeof\n\nimport _ \"jbofd/internal/ssd\"\n",
			"declares the interface it needs"},
		{"direction", "internal/nvmeof/x.go", "package nvmeof\n\nimport _ \"jbofd/internal/nvmeof/tcp\"\n",
			"must not import internal/nvmeof/tcp"},
		{"direction", "client/x.go", "// Package client is.\npackage client\n\nimport _ \"jbofd/internal/nvmeof\"\n",
			"share its bugs"},
		{"direction", "cmd/jbofd/x.go", "// Command jbofd is.\npackage main\n\nimport _ \"jbofd/internal/ssd/file\"\n",
			"flags"},
		{"direction", "internal/brandnew/x.go", "// Package brandnew is.\npackage brandnew\n", "no row"},
		{"dependency", "internal/bufpool/x.go", "package bufpool\n\nimport _ \"github.com/sirupsen/logrus\"\n",
			"not among the dependencies"},
		{"dependency", "internal/bufpool/x.go", "package bufpool\n\nimport _ \"pgregory.net/rapid\"\n",
			"imported by tests only"},
		{"dependency", "internal/bufpool/x.go", "package bufpool\n\nimport _ \"github.com/cockroachdb/pebble/v2\"\n",
			"test/bench"},
		{"dependency", "internal/bufpool/x_test.go", "package bufpool\n\nimport _ \"github.com/dgraph-io/badger/v4\"\n",
			"test/bench"},
		{"dependency", "go.mod", "module jbofd\n\nrequire github.com/sirupsen/logrus v1.0.0\n", "logrus"},
		{"dependency", "go.mod", "module jbofd\n\nrequire (\n\tgithub.com/cockroachdb/pebble v1.0.0 // indirect\n)\n",
			"peer"},
		{"name", "internal/testutil/util/x.go", "// Package util is.\npackage util\n", "package name util"},
		{"name", "internal/testutil/y/x.go", "// Package helpers is.\npackage helpers\n", "package name helpers"},
		{"size", "internal/nvme/x.go", "package nvme\n\nfunc f() {\n" + big + "}\n", "split the file"},
		{"width", "internal/nvme/x.go", "package nvme\n\n// " + strings.Repeat("é", maxLineColumns-2) + "\n",
			"121 columns"},
		{"width", "internal/nvme/x_test.go", "package nvme\n\nfunc f() {\n\tf() // " +
			strings.Repeat("x", maxLineColumns-10) + "\n}\n", "121 columns"},
		{"width", "internal/nvme/x.go", "package nvme\n\nconst x = `" + strings.Repeat("x", maxLineColumns) + "\n`\n",
			"break it"},
		{"package-comment", "internal/drr/x.go", "package drr\n", "internal/drr has no package comment"},
		{"doc", "internal/bufpool/x.go", "package bufpool\n\nfunc Get() {}\n", "exported Get"},
		{"doc", "internal/bufpool/x.go", "package bufpool\n\ntype Pool struct{}\n", "type Pool"},
		{"doc", "internal/bufpool/x.go", "package bufpool\n\n// P is.\ntype P[T any] struct{}\n\n" +
			"func (p *P[T]) Get() {}\n", "exported Get"},
		{"doc", "internal/bufpool/x.go", "package bufpool\n\nconst (\n\tMax = 1\n)\n", "exported Max"},
		{"doc", "internal/nvme/x.go", "package nvme\n\nfunc (s *SQE) Long() {\n\ts[0]++\n\ts[1]++\n}\n",
			"exported Long"},
		{"doc-name", "internal/bufpool/x.go", "package bufpool\n\n// openFile opens.\nfunc openDir() {}\n",
			"comment of openDir begins with openFile"},
		{"doc-name", "internal/bufpool/x.go", "package bufpool\n\n// open's result.\ntype opened struct{}\n",
			"begins with open:"},
		{"doc-name", "internal/bufpool/x_test.go", "package bufpool\n\n// SmallPool is.\nvar LargePool int\n",
			"comment of LargePool"},
		{"doc-name", "internal/bufpool/x.go", "package bufpool\n\nvar (\n\t// one, the first.\n\ttwo, three int\n)\n",
			"comment of two, three"},
		{"mark", "internal/bufpool/x.go", "package bufpool\n\n// " + "TO" + "DO: later.\n", "open an issue"},
		{"mark", "internal/bufpool/x_test.go", "package bufpool\n\n/* " + "FIX" + "ME */\n", "open an issue"},
	}
	planted := map[string]bool{}
	for _, c := range faults {
		planted[c.rule] = true
		t.Run(c.rule+"/"+c.say, func(t *testing.T) {
			found := check(t, c.path, c.src)
			if len(found) != 1 || found[0].Rule != c.rule || !strings.Contains(found[0].What, c.say) ||
				!strings.HasPrefix(found[0].Where, strings.TrimSuffix(c.path, "x.go")) && c.rule != "size" {
				t.Errorf("want one finding of rule %s that says %q at %s, got:\n%s", c.rule, c.say, c.path, list(found))
			}
		})
	}
	for _, r := range Rules {
		if !planted[r.Name] {
			t.Errorf("rule %s has no planted fault", r.Name)
		}
	}
}

func TestCleanModuleHasNoFindings(t *testing.T) {
	if found := check(t, "", ""); len(found) != 0 {
		t.Errorf("findings in a clean module:\n%s", list(found))
	}
}

func check(t *testing.T, path, src string) []Finding {
	t.Helper()
	fsys := fstest.MapFS{}
	for p, s := range clean {
		fsys[p] = &fstest.MapFile{Data: []byte(s)}
	}
	if path != "" {
		fsys[path] = &fstest.MapFile{Data: []byte(src)}
	}
	tree, err := Load(fsys)
	if err != nil {
		t.Fatal(err)
	}
	return Check(tree)
}

func list(fs []Finding) string {
	var b strings.Builder
	for _, f := range fs {
		fmt.Fprintln(&b, f)
	}
	return b.String()
}
