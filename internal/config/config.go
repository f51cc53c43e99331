// Package config reads the daemon's one YAML file.
//
// Reading is strict: an unknown key, a wrong type, a key given twice, a value out
// of range or two parts that contradict each other are errors, and all of them are
// reported together, each with file, line, column, field, value and what is
// allowed. What the file leaves out gets the default written on the field.
//
// The struct tags are the schema. yaml names the key; default, oneof, min and max
// say what is filled in and what is allowed; required keys must be given; reload
// says what a running daemon can change ("live") and what needs a restart (absent).
// docs/configuration.md is made from these tags and the fields' comments.
package config

import (
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"time"
)

// Config is a whole configuration: read, filled with defaults and validated. It
// is not changed after Parse returned it, so any goroutine may read it.
type Config struct {
	// Node says who this daemon is.
	Node Node `yaml:"node"`
	// Log says what is logged and how.
	Log Log `yaml:"log"`
	// Metrics is the HTTP server for Prometheus and for probes.
	Metrics Metrics `yaml:"metrics"`
	// Admin is the local socket that jbofctl talks to.
	Admin Admin `yaml:"admin"`
	// Discovery is the discovery service. It also answers on every listener.
	Discovery Discovery `yaml:"discovery"`
	// Listeners are where hosts connect.
	Listeners []Listener `yaml:"listeners"`
	// SSDs are the drives.
	SSDs []SSD `yaml:"ssds"`
	// Subsystems are the NVM subsystems that hosts connect to.
	Subsystems []Subsystem `yaml:"subsystems"`
	// Tenants share the drives. A host that belongs to none is a tenant of its own, with weight 1 and without limits.
	Tenants []Tenant `yaml:"tenants" reload:"live"`
	// Limits bound what hosts can take of this machine.
	Limits Limits `yaml:"limits"`
	// Cluster is the cluster that this node is a member of. Absent: none; nothing of it runs then.
	Cluster *Cluster `yaml:"cluster,omitempty"`

	pos positions
}

// Node is the section "node".
type Node struct {
	// Name is the node's name in logs and metrics, and in its cluster.
	Name string `yaml:"name" default:"jbof0"`
	// DataDir is the directory for the daemon's own files: which process of a cluster's node it is, and the data of an
	// etcd server, if it runs one. What else must be remembered is in the drives' labels. Drives are not kept here
	// unless their path says so.
	DataDir string `yaml:"data_dir" default:"/var/lib/jbofd"`
}

// Log is the section "log".
type Log struct {
	// Level is the least severe level that is logged.
	Level string `yaml:"level" default:"info" oneof:"debug|info|warn|error" reload:"live"`
	// Format is how a line is written to standard error.
	Format string `yaml:"format" default:"text" oneof:"text|json"`
	// PeerLinesPerSec bounds the lines a second that hosts can cause for one kind of event. What is suppressed is
	// counted.
	PeerLinesPerSec int `yaml:"peer_lines_per_sec" default:"5" min:"1" max:"10000"`
}

// Metrics is the section "metrics".
type Metrics struct {
	// Address serves /metrics, /healthz and /readyz over HTTP. Empty: no server.
	Address string `yaml:"address" default:"127.0.0.1:9420"`
	// Pprof adds /debug/pprof. Anybody who can reach the address can then slow the daemon down.
	Pprof bool `yaml:"pprof" default:"false"`
	// MaxTenants is how many hosts without a tenant get series of their own. Further ones are counted together as
	// tenant "other". Configured tenants always have their own.
	MaxTenants int `yaml:"max_tenants" default:"1000" min:"1" max:"100000"`
}

// Admin is the section "admin".
type Admin struct {
	// Socket is the path of the unix socket. Empty: none.
	Socket string `yaml:"socket" default:"/run/jbofd/admin.sock"`
}

// Discovery is the section "discovery".
type Discovery struct {
	// Address is the discovery service's own listener (TCP). Empty: discovery answers on the listeners only.
	Address string `yaml:"address" default:"0.0.0.0:8009"`
	// Referrals are other discovery services that the discovery log points to.
	Referrals []Referral `yaml:"referrals" reload:"live"`
}

// Referral points to another discovery service.
type Referral struct {
	// NQN is the discovery subsystem's name there.
	NQN string `yaml:"nqn" default:"nqn.2014-08.org.nvmexpress.discovery"`
	// Transport is how that service is reached.
	Transport string `yaml:"transport" default:"tcp" oneof:"tcp|rdma"`
	// Address is that service's IP address and port.
	Address string `yaml:"address" required:"true"`
}

// Listener is an address where hosts connect to subsystems.
type Listener struct {
	// Transport is the NVMe-oF transport. rdma needs a daemon built with TAGS=rdma and an RDMA device; TCP and RDMA can
	// have the same address and port.
	Transport string `yaml:"transport" default:"tcp" oneof:"tcp|rdma"`
	// Address is an IP address of this machine and a port. 0.0.0.0 or [::] stands for all addresses, port 0 for any
	// free port.
	Address string `yaml:"address" required:"true"`
}

// SSD is a drive.
type SSD struct {
	// Name is the drive's name in namespaces, metrics and logs.
	Name string `yaml:"name" required:"true"`
	// Backend is what the drive is: memory, a regular file or block device, an NVMe controller that jbofd drives itself
	// (nvme; the kernel's driver does not have it then) or by SPDK's driver, which also reaches namespaces of other
	// targets (spdk; needs a daemon built with TAGS=spdk), or an emulated drive, whose data are in memory and which
	// answers when a real one would.
	Backend string `yaml:"backend" default:"file" oneof:"mem|file|nvme|spdk|model"`
	// Path is the file or block device (backend file).
	Path string `yaml:"path,omitempty"`
	// Address is the PCI address of the controller (backend nvme), as 0000:03:00.0. jbofctl ssd bind gives it to the
	// driver vfio-pci first.
	Address string `yaml:"address,omitempty"`
	// TrType is how the controller is reached (backend spdk).
	TrType string `yaml:"trtype" default:"pcie" oneof:"pcie|tcp|rdma"`
	// TrAddr is the controller's PCI address, as 0000:03:00.0, or the IP address of the target that has it (backend
	// spdk).
	TrAddr string `yaml:"traddr,omitempty"`
	// TrSvcID is the target's port (backend spdk with tcp or rdma).
	TrSvcID string `yaml:"trsvcid" default:"4420"`
	// SubNQN is the target's subsystem (backend spdk with tcp or rdma).
	SubNQN string `yaml:"subnqn,omitempty"`
	// HostNQN is the name that the daemon has at the target (backend spdk with tcp or rdma). Absent: SPDK makes one.
	HostNQN string `yaml:"hostnqn,omitempty"`
	// NSID is the namespace of the controller that is the drive (backends nvme and spdk). 0: its first active one.
	NSID uint32 `yaml:"nsid" default:"0"`
	// Size is the drive's capacity. Needed for backends mem and model and with create; otherwise it is that of the file
	// or device (0), and another size is refused.
	Size Bytes `yaml:"size" default:"0"`
	// Create makes the file if it does not exist, and makes it larger if size is larger. Its directory must exist.
	Create bool `yaml:"create" default:"false"`
	// Preset is the drive that is emulated (backend model): a Samsung DCT983 with TLC flash, an Intel Optane DC P4800X,
	// or a common drive with SATA, with QLC flash, or of the PCIe 4 or 5 generation.
	Preset string `yaml:"preset" default:"dct983" oneof:"dct983|p4800x|sata|qlc|gen4|gen5"`
	// Condition is the state of the emulated flash at the start (backend model): never written, written once in
	// sequence, or then written at random until write amplification is steady. Preparing the last takes a tenth of a
	// second for each GiB; the map of the flash takes 0.2 % of the size as memory.
	Condition string `yaml:"condition" default:"clean" oneof:"empty|clean|fragmented"`
	// Slowdown makes the emulated drive so many times slower than the real one (backend model): slow enough for a small
	// machine that the drive is the bottleneck and not the processor.
	Slowdown int `yaml:"slowdown" default:"1" min:"1" max:"1000"`
	// Engine is how I/O is done (backend file): io_uring, worker threads, or io_uring where the kernel allows it.
	Engine string `yaml:"engine" default:"auto" oneof:"auto|io_uring|threads"`
	// QueueDepth is how many requests are outstanding at the drive at most; others wait in the daemon. For a virtual
	// disk that serves its requests one after the other, half of what the hosts keep outstanding lets drive and network
	// overlap.
	QueueDepth int `yaml:"queue_depth" default:"256" min:"1" max:"4096"`
	// Policy is how the drive is shared between tenants: by weight and by its latency (jbof), as the Gimbal paper does
	// it (gimbal), in order of arrival (fifo), or as ReFlex, FlashFQ or the kernel's blk-iocost do it.
	Policy string `yaml:"policy" default:"jbof" oneof:"jbof|gimbal|fifo|reflex|flashfq|iocost"`
	// BackgroundWeight is the share that the key-value stores on the drive have for compaction, checkpoints and
	// recovery, against the weights of tenants. Writers wait for compaction when it falls behind.
	BackgroundWeight int `yaml:"background_weight" default:"4" min:"1" max:"10000"`
	// KVSwap is how much of the drive is a swap area, a multiple of 1MiB and at least 16MiB; 0: none. While another
	// drive has much more queued than this one, writes to that drive's key-value namespaces go here, and are returned
	// to it when it has time. As long as some are here, those namespaces do not open without this drive. Another size
	// at a restart makes another area; the old one is freed when its keys have been returned.
	KVSwap Bytes `yaml:"kv_swap" default:"0" min:"0" max:"64GiB"`
	// Calibrate measures the drive with a quarter of a second of reads when the daemon starts, so that policy jbof
	// knows it from the first I/O on. Without, and on a drive that holds less than 64 MiB of data, the policy starts
	// with typical values and learns.
	Calibrate bool `yaml:"calibrate" default:"true"`
	// Fault makes the drive fail on purpose, for tests.
	Fault *Fault `yaml:"fault,omitempty"`
}

// Fault makes a drive fail on purpose.
type Fault struct {
	// Seed makes the faults repeatable.
	Seed int64 `yaml:"seed" default:"1" min:"0" max:"9223372036854775807"`
	// ReadErrorProbability is the share of reads that fail with a media error.
	ReadErrorProbability float64 `yaml:"read_error_probability" default:"0" min:"0" max:"1"`
	// WriteErrorProbability is the share of writes that fail with a media error.
	WriteErrorProbability float64 `yaml:"write_error_probability" default:"0" min:"0" max:"1"`
	// FlushErrorProbability is the share of flushes that fail with a media error.
	FlushErrorProbability float64 `yaml:"flush_error_probability" default:"0" min:"0" max:"1"`
	// Delay is added to the latency of what is delayed.
	Delay time.Duration `yaml:"delay" default:"0s" min:"0s" max:"10m"`
	// DelayProbability is the share of requests that are delayed.
	DelayProbability float64 `yaml:"delay_probability" default:"0" min:"0" max:"1"`
}

// Subsystem is an NVM subsystem.
type Subsystem struct {
	// NQN is the subsystem's name, nqn.YYYY-MM.reverse.domain:text.
	NQN string `yaml:"nqn" required:"true" reload:"live"`
	// Serial is the serial number, 1 to 20 ASCII characters. Absent: derived from the NQN, stable over restarts.
	Serial string `yaml:"serial,omitempty"`
	// Model is the model number, 1 to 40 ASCII characters.
	Model string `yaml:"model" default:"jbofd"`
	// AllowAnyHost lets every host connect.
	AllowAnyHost bool `yaml:"allow_any_host" default:"false" reload:"live"`
	// Hosts are the host NQNs that may connect.
	Hosts []string `yaml:"hosts" reload:"live"`
	// Namespaces are the subsystem's namespaces.
	Namespaces []Namespace `yaml:"namespaces" reload:"live"`
}

// Namespace is a namespace on one drive.
type Namespace struct {
	// NSID is the namespace identifier, unique in its subsystem.
	NSID uint32 `yaml:"nsid" required:"true" min:"1" max:"1024" reload:"live"`
	// SSD is the name of the drive that holds it.
	SSD string `yaml:"ssd" required:"true"`
	// Size is its capacity, a multiple of 1MiB, of type kv at least 64MiB. A reload can make a namespace larger, as far
	// as the space behind it is free, and one of type kv smaller, as far as its keys and values have room.
	// Where on the drive it lies is found once and remembered in the drive's label.
	Size Bytes `yaml:"size" required:"true" min:"1MiB" reload:"live"`
	// BlockSize is the logical block in bytes (type block).
	BlockSize int `yaml:"block_size" default:"4096" oneof:"512|4096"`
	// Type is the command set it speaks: blocks, or keys and values (NVMe Key Value Command Set).
	Type string `yaml:"type" default:"block" oneof:"block|kv"`
	// KV is how keys and values are kept (type kv; others have no settings of it).
	KV KV `yaml:"kv"`
	// Hosts are the only hosts that see it. Empty: all that may connect.
	Hosts []string `yaml:"hosts" reload:"live"`
	// UUID is its UUID. Absent: made once and remembered in the drive's label, from which it can be copied later.
	UUID string `yaml:"uuid,omitempty"`
	// Replicated makes it a partition of the cluster (type kv, in cluster.subsystem only): the cluster decides which
	// keys it has, and keeps copies of them at other nodes. A new one is made once the cluster exists.
	Replicated bool `yaml:"replicated" default:"false"`
}

// KV is how a namespace keeps keys and values.
type KV struct {
	// Durability is what a reply to a write means: it survives a loss of power (device: by the drive's nature, with
	// writes through its cache if that is volatile), or it may be lost with the power (none).
	Durability string `yaml:"durability" default:"device" oneof:"device|none"`
	// KeysPerSegment is how many keys share an entry of 5 bytes in memory, on average. More keys take less memory and
	// make writes longer: 13 is 0.39 bytes a key, 21 is 0.24.
	KeysPerSegment int `yaml:"keys_per_segment" default:"13" min:"1" max:"256"`
	// Requests is how many commands are in progress at once; more wait, by tenant.
	Requests int `yaml:"requests" default:"256" min:"1" max:"32768"`
	// GroupBytes is the size at which small values and index segments that came together are written.
	GroupBytes Bytes `yaml:"group_bytes" default:"64KiB" min:"512" max:"64KiB"`
	// GroupDelay is how long they may wait for more while others are being written. A write waits only while others are
	// in progress.
	GroupDelay time.Duration `yaml:"group_delay" default:"50us" min:"0s" max:"100ms"`
	// ScrubRate is how much is read a second in the background to find what the drive has damaged. 0: nothing.
	ScrubRate Bytes `yaml:"scrub_rate" default:"1MiB" min:"0" max:"1TiB"`
}

// Tenant is who shares drives with others: one or more hosts.
type Tenant struct {
	// Name is the tenant's name in metrics. Not nqn.…, as hosts are called, and not other.
	Name string `yaml:"name" required:"true"`
	// Hosts are the NQNs of the hosts that belong to it. All their queues together have one share.
	Hosts []string `yaml:"hosts" required:"true"`
	// Weight is its share of a drive against that of others.
	Weight int `yaml:"weight" default:"1" min:"1" max:"10000"`
	// Limits are its caps at each drive, with the names of SPDK's bdev_set_qos_limit.
	Limits TenantLimits `yaml:"limits"`
}

// TenantLimits are a tenant's caps at each drive; 0 is none.
type TenantLimits struct {
	// RWIOsPerSec caps all commands a second, those that move no data too. 0: no cap.
	RWIOsPerSec int64 `yaml:"rw_ios_per_sec" default:"0" min:"0" max:"100000000"`
	// RWMBytesPerSec caps reads and writes together, in MiB (1024 × 1024 bytes) a second as SPDK does. 0: no cap.
	RWMBytesPerSec int64 `yaml:"rw_mbytes_per_sec" default:"0" min:"0" max:"1000000"`
	// RMBytesPerSec caps reads, in MiB a second. 0: no cap.
	RMBytesPerSec int64 `yaml:"r_mbytes_per_sec" default:"0" min:"0" max:"1000000"`
	// WMBytesPerSec caps writes, in MiB a second. 0: no cap.
	WMBytesPerSec int64 `yaml:"w_mbytes_per_sec" default:"0" min:"0" max:"1000000"`
}

// Limits is the section "limits".
type Limits struct {
	// Buffers is the memory for data on its way between hosts and drives, in total. Tenants that want more than there
	// is share it evenly.
	Buffers Bytes `yaml:"buffers" default:"128MiB" min:"4MiB" max:"1TiB"`
	// ReceiveBuffer is the memory in which one connection receives.
	ReceiveBuffer Bytes `yaml:"receive_buffer" default:"128KiB" min:"16KiB" max:"16MiB"`
	// RDMAReceives is how many commands each RDMA device can receive before the daemon has looked at them, over all its
	// connections (the shared receive queue). The memory, in_capsule_bytes for each, is taken as connections come;
	// a host that sends while none is posted tries again.
	RDMAReceives int `yaml:"rdma_receives" default:"4096" min:"32" max:"1000000"`
	// Connections is how many connections (queue pairs) hosts can have to subsystems. Further ones are refused. If the
	// configuration names hosts, a quarter is reserved for them, as it is of controllers and hosts.
	Connections int `yaml:"connections" default:"4096" min:"2" max:"1000000"`
	// ConnectionsPerHost is how many of them one host can have.
	ConnectionsPerHost int `yaml:"connections_per_host" default:"512" min:"2" max:"1000000"`
	// PendingConnections is how many connections there can be before their Connect command, beside those of
	// connections. One more closes the oldest of the address that has most.
	PendingConnections int `yaml:"pending_connections" default:"1024" min:"2" max:"100000"`
	// PendingPerAddress is how many of them one address can have (of IPv6 one /64 network). One more closes its oldest.
	PendingPerAddress int `yaml:"pending_per_address" default:"256" min:"1" max:"100000"`
	// Controllers is how many controllers (associations of a host with a subsystem) there can be.
	Controllers int `yaml:"controllers" default:"1024" min:"1" max:"65000"`
	// Hosts is how many different hosts can be connected.
	Hosts int `yaml:"hosts" default:"1024" min:"1" max:"65000"`
	// DiscoveryControllers is how many associations with the discovery service there can be, beside those of
	// controllers. One more closes the idlest of the address that has most.
	DiscoveryControllers int `yaml:"discovery_controllers" default:"256" min:"1" max:"500"`
	// DiscoveryPerAddress is how many of them one address can have (of IPv6 one /64 network). One more closes its
	// idlest.
	DiscoveryPerAddress int `yaml:"discovery_per_address" default:"64" min:"1" max:"500"`
	// QueueDepth is the most commands outstanding on one queue pair.
	QueueDepth int `yaml:"queue_depth" default:"128" min:"2" max:"1023"`
	// IOQueues is how many I/O queue pairs one controller has.
	IOQueues int `yaml:"io_queues" default:"64" min:"1" max:"1024"`
	// InCapsuleBytes is how much data a host may send within a command.
	InCapsuleBytes Bytes `yaml:"in_capsule_bytes" default:"8KiB" min:"4KiB" max:"1MiB"`
	// MDTS is the largest transfer of one command, a power of two. NVMe has no way to announce 4KiB: hosts would read
	// it as "no limit".
	MDTS Bytes `yaml:"mdts" default:"1MiB" min:"8KiB" max:"16MiB"`
	// KATOMin is the shortest keep alive timeout. A host that asks for less gets this.
	KATOMin time.Duration `yaml:"kato_min" default:"1s" min:"100ms" max:"1h"`
	// DiscoveryKATOMax is the largest keep alive timeout of an association with the discovery service. A host that asks
	// for more gets this.
	DiscoveryKATOMax time.Duration `yaml:"discovery_kato_max" default:"5m" min:"1s" max:"24h"`
	// DiscoveryIdleTimeout closes a discovery association without keep alive timer after so long without a command.
	DiscoveryIdleTimeout time.Duration `yaml:"discovery_idle_timeout" default:"2m" min:"1s" max:"24h"`
	// HandshakeTimeout is the time from accepting a connection to its Connect command.
	HandshakeTimeout time.Duration `yaml:"handshake_timeout" default:"10s" min:"100ms" max:"10m"`
	// StallTimeout is how long a host may stop in the middle of a PDU, or not read what is sent to it.
	StallTimeout time.Duration `yaml:"stall_timeout" default:"30s" min:"100ms" max:"1h"`
	// MinTransferRate is how much a second a host must send of what it was asked for, or read of what it has asked for,
	// at each connection and measured over stall_timeout or longer. A slower one holds memory that others need, and is
	// closed. 0: any rate will do.
	MinTransferRate Bytes `yaml:"min_transfer_rate" default:"64KiB" min:"0" max:"1GiB"`
	// QuiesceTimeout is how long the end of a controller's I/O queues (reset, shutdown, lost connection) waits for
	// commands that a drive has before hosts hear that it has failed: longer than the slowest answer of a drive that
	// works. Hosts read it as CQT; a host that has lost its connections may have to wait so long before it can connect
	// again, and none has more patience with a Connect than a minute.
	QuiesceTimeout time.Duration `yaml:"quiesce_timeout" default:"6s" min:"100ms" max:"30s"`
	// DrainTimeout is how long commands under way may take to end when the daemon stops.
	DrainTimeout time.Duration `yaml:"drain_timeout" default:"4s" min:"0s" max:"1h"`
}

// Cluster is the section "cluster".
type Cluster struct {
	// Name is the cluster's name, under which etcd has its records. All nodes have the same.
	Name string `yaml:"name" required:"true"`
	// Subsystem is the NQN of the subsystem whose replicated namespaces are the cluster's partitions. All nodes have
	// the same.
	Subsystem string `yaml:"subsystem" required:"true"`
	// Etcd is where the cluster's records are.
	Etcd Etcd `yaml:"etcd" required:"true"`
	// Nodes are all nodes of the cluster, also this one, which node.name says. Nobody else is heard.
	Nodes []ClusterNode `yaml:"nodes" required:"true" reload:"live"`
	// Listen is where this node listens for the membership of others. Empty: at its own address in nodes.
	Listen string `yaml:"listen" default:""`
	// TLS secures the membership between nodes: each shows a certificate for its name. Absent: a connection must come
	// from the address that the node has in nodes, so that the network must not let others use that.
	TLS *TLS `yaml:"tls,omitempty"`
	// Lease is for how long a node may be silent before others take its place. All nodes have the same.
	Lease time.Duration `yaml:"lease" default:"1s" min:"200ms" max:"1m"`
	// Away is for how long a node may be gone, or a drive may fail, before its ranges are given to others for good.
	Away time.Duration `yaml:"away" default:"10m" min:"1s" max:"720h"`
	// RestoreShare is for how much of the time, in percent, a partition uses its buffers for copies to make those that
	// are missing: a node or a drive is lost. With less there is more left for clients, and it takes longer.
	RestoreShare int `yaml:"restore_share" default:"100" min:"1" max:"100"`
	// FillShare is the same for copies that are to take the place of others which serve until then: a node joins or is
	// drained.
	FillShare int `yaml:"fill_share" default:"25" min:"1" max:"100"`
	// LockKeys lets one write of a key at a time be in its chain, as LEED does by locks, instead of many. It is slower,
	// and there to be compared with.
	LockKeys bool `yaml:"lock_keys" default:"false"`
}

// ClusterNode is a node of the cluster.
type ClusterNode struct {
	// Name is its node.name.
	Name string `yaml:"name" required:"true"`
	// Address is where it listens for the membership of others.
	Address string `yaml:"address" required:"true"`
	// Target is one of its listeners, as tcp://IP:port or rdma://IP:port, for other nodes and for clients.
	Target string `yaml:"target" required:"true"`
	// Domain is its failure domain: nodes that may fail together have the same. Copies of a key are in different ones
	// as far as there are as many. Empty: it is a domain of its own.
	Domain string `yaml:"domain" default:""`
}

// TLS names files, in PEM.
type TLS struct {
	// CA has the certificate authority.
	CA string `yaml:"ca" required:"true"`
	// Cert has the own certificate.
	Cert string `yaml:"cert" required:"true"`
	// Key has the key of the own certificate.
	Key string `yaml:"key" required:"true"`
}

// Etcd says where etcd is. It has endpoints or embedded.
type Etcd struct {
	// Endpoints are the URLs of etcd's servers: http://HOST:PORT, or https with tls.
	Endpoints []string `yaml:"endpoints"`
	// TLS is for https, also of an embedded server, to clients and members.
	TLS *TLS `yaml:"tls,omitempty"`
	// Username is for etcd's authentication. Empty: none.
	Username string `yaml:"username" default:""`
	// PasswordFile has the user's password in its first line.
	PasswordFile string `yaml:"password_file" default:""`
	// Embedded makes the daemon run a server of etcd, as a process of its own (jbofd etcd).
	Embedded *EmbeddedEtcd `yaml:"embedded,omitempty"`
}

// EmbeddedEtcd is a server of etcd that the daemon runs.
type EmbeddedEtcd struct {
	// Dir is the directory of its data. Empty: etcd in node.data_dir.
	Dir string `yaml:"dir" default:""`
	// Members are the servers of a new etcd, with this node's. They are ignored by a server that has data.
	Members []EtcdMember `yaml:"members" required:"true"`
}

// EtcdMember is one server of etcd.
type EtcdMember struct {
	// Name is the name of its node.
	Name string `yaml:"name" required:"true"`
	// ClientURL is where nodes reach it.
	ClientURL string `yaml:"client_url" required:"true"`
	// PeerURL is where the other servers of etcd reach it.
	PeerURL string `yaml:"peer_url" required:"true"`
}

//go:embed demo.yaml
var demo []byte

// DefaultName is what problems in the embedded default are reported under.
const DefaultName = "embedded default"

// DefaultYAML returns the embedded default, a demonstration on loopback with two
// drives in ./data, as the text of a file. The caller owns it.
func DefaultYAML() []byte { return append([]byte(nil), demo...) }

// Default returns the embedded default, parsed. The environment is not applied.
func Default() *Config {
	c, err := Parse(DefaultName, demo)
	if err != nil {
		panic(fmt.Sprintf("config: the embedded default is broken: %v", err))
	}
	return c
}

// Load reads a file, applies the environment of the process (see ParseEnv) and validates it for a machine. The path
// "-" stands for standard input.
//
// Errors: those of os.ReadFile; Errors for what is wrong in the file.
func Load(path string, m Machine) (*Config, error) {
	name, in := path, os.Stdin
	if path == "-" {
		name = "standard input"
	} else {
		var err error
		if in, err = os.Open(path); err != nil {
			return nil, fmt.Errorf("configuration: %w", err)
		}
		defer in.Close()
	}
	data, err := io.ReadAll(io.LimitReader(in, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return ParseFor(m, name, data, os.Environ())
}

// Parse reads and validates the text of a file; name is what problems call it.
//
// Errors: Errors, with every problem found.
func Parse(name string, data []byte) (*Config, error) { return ParseEnv(name, data, nil) }

// ParseEnv is Parse with an environment of KEY=value strings: JBOFD_SECTION_KEY
// replaces the scalar key of a section (JBOFD_LOG_LEVEL=debug). Other variables
// are ignored, but not one that begins with JBOFD_ and a section and names no key.
//
// Errors: Errors, with every problem found.
func ParseEnv(name string, data []byte, environ []string) (*Config, error) {
	return ParseFor(Machine{}, name, data, environ)
}

// ParseFor is ParseEnv for a machine: it refuses what the machine cannot do, too.
//
// Errors: Errors, with every problem found.
func ParseFor(m Machine, name string, data []byte, environ []string) (*Config, error) {
	c := new(Config)
	d := decoder{file: name, pos: positions{}}
	if !d.document(data, c) {
		return nil, d.problems
	}
	d.env(environ, c)
	c.pos = d.pos
	v := validator{decoder: &d, c: c}
	v.all()
	v.machine(m)
	if len(d.problems) > 0 {
		return nil, d.problems.sorted()
	}
	return c, nil
}

// Effective returns the configuration as YAML with every default filled in. Parse
// reads it back to an equal configuration.
func (c *Config) Effective() []byte {
	return appendMapping(nil, reflect.ValueOf(c).Elem(), "", "")
}

// SSD returns the drive of that name.
//
// Errors: ErrNotFound.
func (c *Config) SSD(name string) (SSD, error) {
	for _, s := range c.SSDs {
		if s.Name == name {
			return s, nil
		}
	}
	return SSD{}, fmt.Errorf("ssd %q: %w", name, ErrNotFound)
}

// Self returns this node's entry in the nodes of the cluster, which a valid configuration has.
func (c *Config) Self() ClusterNode {
	for _, n := range c.Cluster.Nodes {
		if n.Name == c.Node.Name {
			return n
		}
	}
	return ClusterNode{}
}

// EtcdEndpoints returns the URLs of etcd's servers.
func (c *Cluster) EtcdEndpoints() []string {
	if c.Etcd.Embedded == nil {
		return c.Etcd.Endpoints
	}
	var all []string
	for _, m := range c.Etcd.Embedded.Members {
		all = append(all, m.ClientURL)
	}
	return all
}

// ErrNotFound says that the configuration names no such thing.
var ErrNotFound = errors.New("not in the configuration")
