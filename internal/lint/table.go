package lint

// module is this module's path.
const module = "jbofd"

// pure are the packages of state, event and now: no I/O, clock, randomness, lock or
// goroutine inside, so that the daemon, the simulator and the tests run the same code. Folders
// that do not exist yet have their row already.
var pure = []string{
	"internal/nvme",
	"internal/drr",
	"internal/tokenbucket",
	"internal/congestion",
	"internal/credit",
	"internal/pipeline",
	"internal/pipeline/gimbal",
	"internal/pipeline/jbof",
	"internal/pipeline/baseline",
	"internal/pipeline/policies",
	"internal/ssd/model/flash",
	"internal/sim",
	"internal/nvmeof",
	"internal/nvmeof/qpair",
	"internal/nvmeof/tcp",
	"internal/nvmeof/tcp/pdu",
	"internal/nvmeof/rdma",
	"internal/nvmeof/rdma/cm",
	"internal/nvmeof/rdma/wr",
	"internal/kvstore",
	"internal/kvstore/budget",
	"internal/kvstore/checkpoint",
	"internal/kvstore/chunks",
	"internal/kvstore/fifo",
	"internal/kvstore/format",
	"internal/kvstore/lookup",
	"internal/kvstore/prelude",
	"internal/kvstore/recovery",
	"internal/kvstore/setup",
	"internal/kvstore/segtbl",
	"internal/kvstore/swap",
	"internal/kvstore/swap/guest",
	"internal/kvstore/walk",
	"internal/crrs",
	"internal/ordering",
}

// impure are standard packages (with all below them, but for the exceptions) that a pure
// package must not import.
var (
	impure           = []string{"os", "net", "sync", "math/rand", "crypto/rand", "syscall", "golang.org/x/sys", "context"}
	impureExceptions = []string{"net/netip"}
)

// cgoPackages may import "C", behind a build tag of their own.
var cgoPackages = map[string]string{
	"internal/nvmeof/rdma/verbs": "rdma",
	"internal/ssd/spdk":          "spdk",
}

// wireFormats are packages of views over bytes, whose one-line getters and setters need no
// comment: their meaning is the field's in the specification.
var wireFormats = []string{
	"internal/nvme",
	"internal/nvmeof/tcp/pdu",
	"internal/nvmeof/rdma/cm",
	"internal/ssd/label",
	"internal/kvstore/format",
	"internal/kvstore/swap/guest",
}

// row says which packages of this module the packages under dir may import: those listed
// and all below them where an entry ends with "/...".
type row struct {
	dir    string
	may    []string
	remedy string
}

// Packages that anyone may import: they know nobody but each other.
var base = []string{"internal/buildtags", "internal/invariants", "internal/ring"}

const (
	toFormat    = "formats know nobody: let the caller pass what is needed"
	toAlgorithm = "algorithms know nobody: let pipeline put them together"
	toMachine   = "a machine declares the interface it needs; a transport, device or cluster package implements it and daemon joins them"
	toDevice    = "a device knows ssd's interface only; what it must tell others goes through its Completion or Info"
	toDriver    = "declare an interface here and let daemon pass the implementation"
	toClient    = "the public host shares formats with the target, never its machines: a peer that shares code shares bugs"
	toCmd       = "a command turns flags into a config and calls one package; move the work there"
)

// directions is the order of the house, from the ones who know nobody to the one who
// knows all. The row with the longest matching dir counts; a package below internal, client or cmd
// without a row is an error.
var directions = []row{
	{"internal/buildtags", nil, toFormat},
	{"internal/invariants", nil, toFormat},
	{"internal/ring", nil, toFormat},
	{"internal/testutil", []string{"internal/nvme"}, "test tools know formats only"},
	{"internal/lint", nil, toFormat},

	{"internal/nvme", nil, toFormat},
	{"internal/nvmeof/tcp/pdu", []string{"internal/nvme"}, toFormat},
	{"internal/drr", nil, toAlgorithm},
	{"internal/tokenbucket", nil, toAlgorithm},
	{"internal/congestion", nil, toAlgorithm},
	{"internal/credit", nil, toAlgorithm},

	{"internal/pipeline", []string{"internal/drr", "internal/tokenbucket", "internal/congestion", "internal/credit"}, toMachine},
	{"internal/pipeline/gimbal", []string{"internal/pipeline", "internal/drr", "internal/tokenbucket", "internal/congestion", "internal/credit"}, toMachine},
	{"internal/pipeline/jbof", []string{"internal/pipeline", "internal/drr", "internal/tokenbucket", "internal/congestion", "internal/credit"}, toMachine},
	{"internal/pipeline/baseline", []string{"internal/pipeline", "internal/drr", "internal/tokenbucket", "internal/congestion", "internal/credit"}, toMachine},
	{"internal/pipeline/policies", []string{"internal/pipeline/..."}, toMachine},
	{"internal/nvmeof", []string{"internal/nvme/...", "internal/pipeline"}, toMachine},
	{"internal/nvmeof/qpair", []string{"internal/nvme/...", "internal/nvmeof", "internal/pipeline"}, toMachine},
	{"internal/nvmeof/tcp", []string{"internal/nvme/...", "internal/nvmeof", "internal/nvmeof/qpair", "internal/nvmeof/tcp/pdu"}, toMachine},
	{"internal/nvmeof/rdma", []string{"internal/nvme/...", "internal/nvmeof", "internal/nvmeof/qpair", "internal/nvmeof/rdma/cm", "internal/nvmeof/rdma/wr"}, toMachine},
	{"internal/nvmeof/rdma/cm", nil, toFormat},
	{"internal/nvmeof/rdma/wr", nil, toFormat},
	{"internal/kvstore", []string{"internal/kvstore/...", "internal/nvme/...", "internal/pipeline"}, toMachine},
	{"internal/kvstore/swap", []string{"internal/kvstore", "internal/kvstore/fifo", "internal/kvstore/format", "internal/kvstore/swap/guest", "internal/pipeline"}, toMachine},
	{"internal/kvstore/swap/guest", []string{"internal/kvstore/format", "internal/kvstore/prelude"}, toFormat},
	{"internal/kvstore/prelude", nil, toFormat},
	{"internal/kvstore/fifo", nil, toAlgorithm},
	{"internal/partition", []string{"internal/bufpool", "internal/kvstore/...", "internal/owner", "internal/pipeline", "internal/ssd"}, toDriver},
	{"internal/crrs", []string{"internal/crrs/...", "internal/kvstore", "internal/nvme/...", "internal/pipeline"}, toMachine},
	{"internal/ordering", []string{"internal/ordering/...", "internal/nvme/...", "internal/pipeline"}, toMachine},

	{"internal/bufpool", nil, toDriver},
	{"internal/uring", nil, toDriver},
	{"internal/ssd", nil, toDevice},
	{"internal/ssd/ssdtest", []string{"internal/ssd", "internal/bufpool"}, toDevice},
	{"internal/ssd/mem", []string{"internal/ssd", "internal/bufpool"}, toDevice},
	{"internal/ssd/file", []string{"internal/ssd", "internal/bufpool", "internal/uring"}, toDevice},
	{"internal/ssd/fault", []string{"internal/ssd", "internal/bufpool"}, toDevice},
	{"internal/ssd/model", []string{"internal/ssd", "internal/bufpool", "internal/ssd/model/flash"}, toDevice},
	{"internal/ssd/model/flash", nil, "the emulated drive is a machine: its device drives it"},
	{"internal/sim", []string{"internal/sim/...", "internal/pipeline/...", "internal/credit", "internal/ssd/model/flash"}, "a simulation joins machines only"},
	{"internal/sim/report", []string{"internal/sim"}, "a report knows results only"},
	{"internal/ssd/spdk", []string{"internal/ssd", "internal/bufpool"}, toDevice},
	{"internal/ssd/label", []string{"internal/ssd", "internal/nvme"}, toDevice},
	{"internal/owner", []string{"internal/bufpool", "internal/pipeline/...", "internal/ssd", "internal/kvstore", "internal/crrs"}, toDriver},
	{"internal/nvmeof/fabric", []string{"internal/bufpool", "internal/credit", "internal/nvme/...", "internal/nvmeof", "internal/owner", "internal/kvstore", "internal/partition", "internal/pipeline", "internal/ssd", "internal/telemetry"}, toDriver},
	{"internal/nvmeof/fabric/queue", []string{"internal/bufpool", "internal/credit", "internal/nvme/...", "internal/nvmeof", "internal/nvmeof/fabric", "internal/nvmeof/qpair", "internal/owner", "internal/kvstore", "internal/partition", "internal/pipeline", "internal/ssd", "internal/telemetry"}, toDriver},
	{"internal/nvmeof/tcp/serve", []string{"internal/bufpool", "internal/nvme/...", "internal/nvmeof/...", "internal/owner", "internal/kvstore", "internal/partition", "internal/pipeline", "internal/ssd", "internal/telemetry"}, toDriver},
	{"internal/nvmeof/rdma/verbs", []string{"internal/nvmeof/rdma/wr"}, toDriver},
	{"internal/nvmeof/rdma/memverbs", []string{"internal/nvmeof/rdma/verbs"}, toDriver},
	{"internal/nvmeof/rdma/verbstest", []string{"internal/nvmeof/rdma/verbs"}, toDriver},
	{"internal/nvmeof/rdma/rawhost", []string{"internal/nvme", "internal/nvmeof/rdma/cm", "internal/nvmeof/rdma/verbs"}, "a test tool knows formats and verbs only"},
	{"internal/nvmeof/rdma/serve", []string{"internal/bufpool", "internal/nvme/...", "internal/nvmeof/...", "internal/owner", "internal/kvstore", "internal/partition", "internal/pipeline", "internal/ssd", "internal/telemetry"}, toDriver},
	{"internal/cluster", []string{"internal/cluster/...", "internal/crrs", "internal/kvstore", "client"}, toDriver},
	{"internal/pushdown", []string{"internal/pushdown/...", "internal/nvme/...", "internal/pipeline", "internal/bufpool"}, toDriver},
	{"internal/offload", []string{"internal/offload/...", "internal/nvme/...", "internal/bufpool", "client"}, toDriver},
	{"internal/telemetry", []string{"internal/nvme/...", "internal/ssd", "internal/pipeline"}, toDriver},
	{"internal/config", []string{"internal/nvme", "internal/ssd/label"}, toDriver},

	{"client", []string{"client/...", "internal/credit", "internal/nvme/...", "internal/nvmeof/tcp/pdu", "internal/nvmeof/rdma/cm", "internal/nvmeof/rdma/verbs", "internal/nvmeof/rdma/wr", "internal/bufpool"}, toClient},
	{"internal/bench", []string{"internal/bench/...", "client/...", "internal/ssd/...", "internal/bufpool", "internal/nvme/...", "internal/config"}, toDriver},
	{"internal/bench/ycsb", []string{"internal/bench", "client/...", "internal/ssd/...", "internal/bufpool", "internal/kvstore", "internal/owner", "internal/partition", "internal/pipeline"}, toDriver},
	{"internal/demo", []string{"internal/admin", "internal/bench", "internal/config", "client"}, toDriver},
	{"internal/daemon", []string{"internal/...", "client"}, toCmd},
	{"internal/admin", []string{"internal/config", "internal/nvme/...", "internal/ssd/label", "client"}, toDriver},
	{"cmd", []string{"internal/daemon/...", "internal/config", "internal/admin"}, toCmd},
	{"cmd/jbofbench", []string{"internal/sim/...", "internal/bench/...", "internal/config", "internal/demo", "client"}, toCmd},
	{"cmd/jbofctl", []string{"internal/admin", "internal/config", "internal/ssd/...", "client"}, toCmd},
	{"test", []string{"internal/...", "client/...", "test/..."}, toCmd},
}

// dependencies are the modules outside of the standard library that code may import.
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
	"golang.org/x/sys",
	"gonum.org/v1/plot",
}

// testDependencies may be imported by tests and test tools besides.
var testDependencies = []string{
	"github.com/anishathalye/porcupine",
	"github.com/cockroachdb/datadriven",
	"github.com/prometheus/client_model",
	"github.com/prometheus/common",
	"pgregory.net/rapid",
}

// peers are what jbofd is measured against; they live in a module of their own.
var peers = []string{
	"github.com/cockroachdb/pebble",
	"github.com/dgraph-io/badger",
}

// peerModule is the folder of that module.
const peerModule = "test/bench"

// badNames say nothing about what a package holds.
var badNames = []string{"util", "utils", "common", "helper", "helpers", "misc", "shared", "base", "manager2", "types"}

// maxLines is how many lines of code a package may have, not counting comments, blank lines,
// tests, and the one-line accessors of wire formats.
const maxLines = 2000
