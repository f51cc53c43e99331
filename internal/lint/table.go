package lint

// module is this module's path.
const module = "jbofd"

// pure lists the packages of algorithms and state machines. They use no I/O, clock, source of randomness, lock or
// goroutine, so that the daemon, the simulator and the tests run the same code. Packages that do not exist yet are
// listed already.
var pure = []string{
	"internal/nvme",
	"internal/tenant",
	"internal/units",
	"internal/uuid",
	"internal/drr",
	"internal/tokenbucket",
	"internal/congestion",
	"internal/credit",
	"internal/flowctl",
	"internal/pipeline",
	"internal/pipeline/gimbal",
	"internal/pipeline/jbof",
	"internal/pipeline/baseline",
	"internal/pipeline/policies",
	"internal/ssd/model/flash",
	"internal/ssd/parts",
	"internal/sim",
	"internal/nvmeof",
	"internal/nvmeof/executor",
	"internal/nvmeof/qpair",
	"internal/nvmeof/tcp",
	"internal/nvmeof/tcp/pdu",
	"internal/nvmeof/rdma",
	"internal/nvmeof/rdma/cm",
	"internal/nvmeof/rdma/wr",
	"internal/list",
	"internal/slab",
	"internal/kvstore",
	"internal/kvstore/check",
	"internal/kvstore/format",
	"internal/kvstore/lookup",
	"internal/kvstore/recovery",
	"internal/kvstore/space",
	"internal/kvstore/swap",
	"internal/cluster",
	"internal/cluster/view",
	"internal/crrs",
	"internal/crrs/linear",
	"internal/replica",
	"internal/ordering",
	"client/internal/host",
	"client/internal/hosttcp",
	"client/internal/hostrdma",
	"client/internal/kvop",
}

// impure lists the packages that a pure package must not import, nor any package below them except impureExceptions.
var (
	impure = []string{"os", "net", "sync", "math/rand", "crypto/rand", "syscall", "golang.org/x/sys",
		"context"}
	impureExceptions = []string{"net/netip"}
)

// cgoPackages maps the packages that may import "C" to the build tag that they need.
var cgoPackages = map[string]string{
	"internal/nvmeof/rdma/verbs": "rdma",
	"internal/ssd/spdk":          "spdk",
}

// wireFormats lists packages of views over bytes. Their one-line getters and setters need no comment, because the
// specification defines the fields.
var wireFormats = []string{
	"internal/nvme",
	"internal/nvmeof/tcp/pdu",
	"internal/nvmeof/rdma/cm",
	"internal/ssd/label",
	"internal/kvstore/format",
}

// row lists which packages of this module the packages at and below dir may import. An entry that ends with "/..."
// includes all packages below it. remedy is the advice given when the rule is broken.
type row struct {
	dir    string
	may    []string
	remedy string
}

// base lists the packages that every package may import. They import only each other.
var base = []string{"internal/buildtags", "internal/fence", "internal/invariants", "internal/list", "internal/ring",
	"internal/slab", "internal/tenant", "internal/units", "internal/uuid"}

const (
	toFormat    = "a format package imports no other package: let the caller pass what is needed"
	toAlgorithm = "an algorithm imports no other package: let internal/pipeline combine algorithms"
	toMachine   = "a state machine declares the interface it needs; a transport, device or cluster package " +
		"implements " +
		"it, and internal/daemon connects them"
	toDevice = "a device imports only the interface in internal/ssd; report everything through Completion or Info"
	toDriver = "declare an interface here and let internal/daemon pass the implementation"
	toClient = "the client shares formats with the target but no state machines: two ends that share code share its " +
		"bugs, and tests of one against the other would not find them"
	toCmd = "a command turns flags into a config and calls one package; move the work there"
)

// directions says which package may import which, from the packages without imports to the daemon, which imports all.
// The row with the longest matching dir applies. A package below internal, client or cmd without a row is an error.
var directions = []row{
	{"internal/buildtags", nil, toFormat},
	{"internal/invariants", nil, toFormat},
	{"internal/list", nil, toFormat},
	{"internal/ring", nil, toFormat},
	{"internal/slab", nil, toFormat},
	{"internal/fence", nil, "a fence handles holders and epochs only: the caller decides what they stand for"},
	{"internal/tenant", nil, toFormat},
	{"internal/units", nil, toFormat},
	{"internal/uuid", nil, toFormat},
	{"internal/testutil", []string{"internal/buildtags", "internal/nvme"}, "test tools import formats only"},
	{"internal/testutil/ioload", []string{"client"}, "a load is a host: it knows the target by its address only"},
	{"internal/testutil/anyorder", []string{"internal/crrs/linear"}, "it checks the histories that linear defines"},
	{"internal/lint", nil, toFormat},

	{"internal/nvme", nil, toFormat},
	{"internal/nvmeof/tcp/pdu", []string{"internal/nvme"}, toFormat},
	{"internal/drr", nil, toAlgorithm},
	{"internal/tokenbucket", nil, toAlgorithm},
	{"internal/congestion", nil, toAlgorithm},
	{"internal/credit", nil, toAlgorithm},
	{"internal/flowctl", []string{"internal/credit"}, toAlgorithm},

	{"internal/pipeline", []string{"internal/drr", "internal/tokenbucket", "internal/congestion", "internal/credit"},
		toMachine},
	{"internal/pipeline/gimbal", []string{"internal/pipeline", "internal/drr", "internal/tokenbucket",
		"internal/congestion", "internal/credit"}, toMachine},
	{"internal/pipeline/jbof", []string{"internal/pipeline", "internal/drr", "internal/tokenbucket",
		"internal/congestion", "internal/credit"}, toMachine},
	{"internal/pipeline/baseline", []string{"internal/pipeline", "internal/drr", "internal/tokenbucket",
		"internal/congestion", "internal/credit"}, toMachine},
	{"internal/pipeline/policies", []string{"internal/pipeline/..."}, toMachine},
	{"internal/nvmeof", []string{"internal/nvme/...", "internal/pipeline"}, toMachine},
	{"internal/nvmeof/qpair", []string{"internal/nvme/...", "internal/nvmeof", "internal/pipeline"}, toMachine},
	{"internal/nvmeof/tcp", []string{"internal/nvme/...", "internal/nvmeof", "internal/nvmeof/qpair",
		"internal/nvmeof/tcp/pdu"}, toMachine},
	{"internal/nvmeof/rdma", []string{"internal/nvme/...", "internal/nvmeof", "internal/nvmeof/qpair",
		"internal/nvmeof/rdma/cm", "internal/nvmeof/rdma/wr"}, toMachine},
	{"internal/nvmeof/rdma/cm", nil, toFormat},
	{"internal/nvmeof/rdma/wr", nil, toFormat},
	{"internal/kvstore", []string{"internal/kvstore/...", "internal/nvme/...", "internal/pipeline"}, toMachine},
	{"internal/kvstore/format", nil, toFormat},
	{"internal/kvstore/space", []string{"internal/kvstore/format"}, toMachine},
	{"internal/kvstore/lookup", []string{"internal/kvstore/format", "internal/kvstore/space", "internal/nvme"},
		toMachine},
	{"internal/kvstore/recovery", []string{"internal/kvstore/format", "internal/kvstore/lookup",
		"internal/kvstore/space"}, toMachine},
	{"internal/kvstore/check", []string{"internal/kvstore/format", "internal/kvstore/lookup",
		"internal/kvstore/recovery", "internal/kvstore/space"}, toMachine},
	{"internal/kvstore/swap", []string{"internal/kvstore", "internal/kvstore/format", "internal/kvstore/space",
		"internal/pipeline"}, toMachine},
	{"internal/partition", []string{"internal/bufpool", "internal/kvstore/...", "internal/drive", "internal/pipeline",
		"internal/ssd", "internal/turn"}, toDriver},
	{"internal/crrs", []string{"internal/crrs/...", "internal/kvstore", "internal/nvme/...", "internal/pipeline"},
		toMachine},
	{"internal/replica", []string{"internal/crrs", "internal/kvstore", "internal/kvstore/format", "internal/nvme"},
		toMachine},
	{"internal/replicas", []string{"internal/bufpool", "internal/cluster", "internal/cluster/view", "internal/crrs",
		"internal/drive", "internal/kvstore", "internal/nvme", "internal/partition", "internal/peers",
		"internal/replica", "internal/ssd", "internal/turn"}, toDriver},
	{"internal/ordering", []string{"internal/ordering/...", "internal/nvme/...", "internal/pipeline"}, toMachine},

	{"internal/turn", nil, toDriver},
	{"internal/bufpool", nil, toDriver},
	{"internal/uring", nil, toDriver},
	{"internal/eventfd", nil, toDriver},
	{"internal/ssd", []string{"internal/nvme"}, toDevice},
	{"internal/ssd/ssdtest", []string{"internal/ssd", "internal/bufpool"}, toDevice},
	{"internal/ssd/mem", []string{"internal/ssd", "internal/bufpool"}, toDevice},
	{"internal/ssd/file", []string{"internal/ssd", "internal/bufpool", "internal/uring", "internal/eventfd",
		"internal/nvme"}, toDevice},
	{"internal/ssd/fault", []string{"internal/ssd", "internal/bufpool"}, toDevice},
	{"internal/ssd/model", []string{"internal/ssd", "internal/bufpool", "internal/ssd/model/flash"}, toDevice},
	{"internal/ssd/model/flash", nil, "the emulated drive is a state machine: internal/ssd/model drives it"},
	{"internal/sim", []string{"internal/sim/...", "internal/pipeline/...", "internal/credit", "internal/flowctl",
		"internal/ssd/model/flash"}, "a simulation combines state machines only"},
	{"internal/sim/cluster", []string{"internal/..."}, "a simulated cluster consists of the packages that the daemon " +
		"uses"},
	{"internal/sim/report", []string{"internal/sim"}, "a report imports results only"},
	{"internal/lab", []string{"internal/ssd", "internal/turn"}, "the simulated environment imports the interfaces of " +
		"devices and drivers only; internal/lab/node assembles a whole node"},
	{"internal/lab/node", []string{"internal/..."}, "a simulated node consists of the packages that the daemon uses"},
	{"internal/ssd/parts", []string{"internal/ssd", "internal/nvme"},
		"it keeps account of requests, and knows no drive"},
	{"internal/ssd/spdk", []string{"internal/ssd", "internal/bufpool", "internal/nvme", "internal/eventfd",
		"internal/ssd/parts"}, toDevice},
	{"internal/ssd/vfio", []string{"internal/ssd", "internal/bufpool", "internal/nvme", "internal/eventfd",
		"internal/ssd/parts", "internal/ssd/vfio/..."}, toDevice},
	{"internal/ssd/vfio/pcie", []string{"internal/nvme", "internal/eventfd"},
		"it drives a controller, and knows no drive"},
	{"internal/ssd/vfio/pci", []string{"internal/eventfd", "internal/ssd/vfio/pcie"},
		"it owns functions, and knows no drive"},
	{"internal/ssd/vfio/pcietest", []string{"internal/nvme", "internal/eventfd", "internal/ssd/vfio/pcie"},
		"a test tool imports the interface only"},
	{"internal/ssd/label", []string{"internal/ssd", "internal/nvme"}, toDevice},
	{"internal/drive", []string{"internal/bufpool", "internal/pipeline/...", "internal/ssd", "internal/kvstore",
		"internal/crrs", "internal/turn"}, toDriver},
	{"internal/nvmeof/target", []string{"internal/bufpool", "internal/credit", "internal/nvme/...", "internal/nvmeof",
		"internal/nvmeof/executor/...", "internal/drive", "internal/kvstore", "internal/partition", "internal/pipeline",
		"internal/ssd", "internal/telemetry", "internal/turn"}, toDriver},
	{"internal/nvmeof/target/targettest", []string{"internal/bufpool", "internal/drive", "internal/nvme",
		"internal/nvmeof", "internal/nvmeof/executor/kv", "internal/nvmeof/target", "internal/nvmeof/target/kvtest",
		"internal/pipeline", "internal/ssd", "internal/ssd/mem", "internal/telemetry"},
		"a test tool for all transports imports none of them"},
	{"internal/nvmeof/target/connection", []string{"internal/bufpool", "internal/credit", "internal/nvme/...",
		"internal/nvmeof", "internal/nvmeof/target", "internal/nvmeof/executor", "internal/nvmeof/qpair",
		"internal/telemetry", "internal/turn"}, toDriver},
	{"internal/nvmeof/qpair/qpairtest", []string{"internal/nvme", "internal/nvmeof", "internal/nvmeof/qpair"},
		"a test tool for all transports imports none of them"},
	{"internal/nvmeof/executor", []string{"internal/bufpool", "internal/nvme", "internal/nvmeof", "internal/fence"},
		"executors import the interface; the interface imports none of them"},
	{"internal/nvmeof/executor/block", []string{"internal/fence", "internal/drive", "internal/nvme", "internal/nvmeof",
		"internal/nvmeof/executor", "internal/pipeline", "internal/ssd"}, toDriver},
	{"internal/nvmeof/executor/kv", []string{"internal/bufpool", "internal/credit", "internal/kvstore", "internal/nvme",
		"internal/nvmeof", "internal/nvmeof/executor", "internal/nvmeof/executor/memory", "internal/partition",
		"internal/turn"}, toDriver},
	{"internal/nvmeof/executor/replicated", []string{"internal/bufpool", "internal/crrs", "internal/kvstore",
		"internal/nvme", "internal/nvmeof", "internal/nvmeof/executor", "internal/nvmeof/executor/memory",
		"internal/replicas", "internal/turn"}, toDriver},
	{"internal/nvmeof/executor/memory", []string{"internal/bufpool", "internal/nvme", "internal/nvmeof/executor",
		"internal/turn"}, toDriver},
	{"internal/nvmeof/executor/executortest", []string{"internal/bufpool", "internal/fence", "internal/nvme",
		"internal/nvmeof", "internal/nvmeof/executor", "internal/ssd"}, "a test tool imports the interface only"},
	{"internal/nvmeof/tcp/serve", []string{"internal/bufpool", "internal/nvme/...", "internal/nvmeof/...",
		"internal/drive", "internal/kvstore", "internal/partition", "internal/pipeline", "internal/ssd",
		"internal/telemetry", "internal/turn"}, toDriver},
	{"internal/nvmeof/rdma/verbs", []string{"internal/nvmeof/rdma/wr"}, toDriver},
	{"internal/nvmeof/rdma/memverbs", []string{"internal/nvmeof/rdma/verbs"}, toDriver},
	{"internal/nvmeof/rdma/verbstest", []string{"internal/nvmeof/rdma/verbs"}, toDriver},
	{"internal/nvmeof/rdma/rawhost", []string{"internal/nvme", "internal/nvmeof/rdma/cm", "internal/nvmeof/rdma/verbs"},
		"a test tool imports formats and verbs only"},
	{"internal/nvmeof/rdma/serve", []string{"internal/bufpool", "internal/nvme/...", "internal/nvmeof/...",
		"internal/drive", "internal/kvstore", "internal/partition", "internal/pipeline", "internal/ssd",
		"internal/telemetry", "internal/turn"}, toDriver},
	{"internal/cluster", []string{"internal/cluster/view"}, toMachine},
	{"internal/cluster/view", nil, toMachine},
	{"internal/cluster/etcd", []string{"internal/cluster"}, toDriver},
	{"internal/cluster/link", []string{"internal/cluster"}, toDriver},
	{"internal/cluster/member", []string{"internal/cluster", "internal/cluster/etcd", "internal/cluster/link",
		"internal/cluster/view"}, toDriver},
	{"internal/cluster/etcdserver", []string{"internal/cluster/etcd"}, toDriver},
	{"internal/peers", []string{"client", "internal/cluster", "internal/cluster/view", "internal/nvme",
		"internal/nvmeof/rdma/verbs", "internal/turn"}, toDriver},
	{"internal/pushdown", []string{"internal/pushdown/...", "internal/nvme/...", "internal/pipeline",
		"internal/bufpool", "internal/turn"}, toDriver},
	{"internal/offload", []string{"internal/offload/...", "internal/nvme/...", "internal/bufpool", "client"}, toDriver},
	{"internal/publish", []string{"internal/drive", "internal/nvme", "internal/nvmeof", "internal/nvmeof/target",
		"internal/partition", "internal/pipeline", "internal/ssd"}, toDriver},
	{"internal/telemetry", []string{"internal/nvme/...", "internal/ssd", "internal/pipeline"}, toDriver},
	{"internal/config", []string{"internal/nvme", "internal/ssd/label", "internal/ssd/vfio/pci"}, toDriver},

	{"client", []string{"client/...", "internal/credit", "internal/flowctl", "internal/nvme/...",
		"internal/nvmeof/tcp/pdu", "internal/nvmeof/rdma/cm", "internal/nvmeof/rdma/verbs", "internal/nvmeof/rdma/wr",
		"internal/bufpool"}, toClient},
	{"internal/bench", []string{"internal/bench/...", "client/...", "internal/ssd/...", "internal/bufpool",
		"internal/nvme/...", "internal/config"}, toDriver},
	{"internal/bench/ycsb", []string{"internal/bench", "client/...", "internal/ssd/...", "internal/bufpool",
		"internal/kvstore", "internal/drive", "internal/partition", "internal/pipeline"}, toDriver},
	{"internal/demo", []string{"internal/admin", "internal/bench", "internal/config", "client", "client/cluster"},
		toDriver},
	{"internal/daemon", []string{"internal/...", "client"}, toCmd},
	{"internal/admin", []string{"internal/config", "internal/nvme/...", "internal/ssd", "internal/ssd/label", "client"},
		toDriver},
	{"cmd", []string{"internal/daemon/...", "internal/config", "internal/admin"}, toCmd},
	{"cmd/jbofd", []string{"internal/daemon/...", "internal/config", "internal/admin", "internal/cluster/etcdserver"},
		toCmd},
	{"cmd/jbofbench", []string{"internal/sim/...", "internal/bench/...", "internal/config", "internal/demo", "client",
		"client/cluster"}, toCmd},
	{"cmd/jbofctl", []string{"internal/admin", "internal/config", "internal/partition", "internal/ssd/...", "client"},
		toCmd},
	{"test", []string{"internal/...", "client/...", "test/..."}, toCmd},
}

// dependencies lists the modules outside of the standard library that any package may import.
var dependencies = []string{
	"github.com/HdrHistogram/hdrhistogram-go",
	"github.com/cespare/xxhash",
	"github.com/cilium/ebpf",
	"github.com/coreos/go-systemd",
	"github.com/goccy/go-yaml",
	"github.com/prometheus/client_golang",
	"github.com/spf13/cobra",
	"github.com/vbauerster/mpb",
	"github.com/zeebo/xxh3",
	"go.etcd.io/etcd",
	"go.uber.org/zap", // the log of the etcd client
	"golang.org/x/sys",
	"gonum.org/v1/plot",
	"google.golang.org/grpc", // how the etcd client connects
}

// testDependencies lists the modules that only tests and test tools may import.
var testDependencies = []string{
	"github.com/anishathalye/porcupine",
	"github.com/cockroachdb/datadriven",
	"github.com/prometheus/client_model",
	"github.com/prometheus/common",
	"pgregory.net/rapid",
}

// testTools lists the folders whose packages count as tests, because only tests import them.
var testTools = []string{"client/internal/host/hosttest", "internal/ssd/ssdtest", "internal/testutil", "test"}

// testEnvironment may be imported by tests and by the simulator only, which is not part of the daemon.
const (
	testEnvironment = "internal/lab"
	simulator       = "internal/sim/cluster"
)

// peers lists the modules that jbofd is compared with. Only the module peerModule imports them.
var peers = []string{
	"github.com/cockroachdb/pebble",
	"github.com/dgraph-io/badger",
}

// peerModule is the folder of that module.
const peerModule = "test/bench"

// badNames lists package names that do not say what the package is about.
var badNames = []string{"util", "utils", "common", "helper", "helpers", "misc", "shared", "base", "manager2", "types"}

// maxFileLines is the maximum length of a file: a longer one usually has more than one subject.
const maxFileLines = 600

// maxLineColumns is the maximum width of a line, with tabWidth columns for a tab.
const (
	maxLineColumns = 120
	tabWidth       = 4
)
