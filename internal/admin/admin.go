// Package admin defines the daemon's local API for both ends: the JSON documents of the admin socket, and the client
// that jbofctl and the demonstration use.
//
// The API is HTTP with JSON over a unix socket that only the user of the daemon may open:
//
//	GET  /v1/status             Status
//	GET  /v1/ssds               List[SSD]
//	GET  /v1/subsystems         List[Subsystem]
//	GET  /v1/connections        List[Connection]
//	GET  /v1/tenants            List[Tenant]
//	POST /v1/reload             Reload; with ?dryRun=true nothing changes
//	POST /v1/namespaces/delete  DeleteNamespace -> Answer
//	GET  /v1/swap               List[SwapArea]
//	POST /v1/swap/discard       DiscardSwap -> Answer
//	GET  /v1/kv/audits          List[KVAudit]
//	POST /v1/kv/audit           AuditKV -> KVAudit
//	GET  /v1/kv/scrubs          List[KVScrub]
//	POST /v1/kv/scrub           ScrubKV -> KVScrub
//	POST /v1/kv/open            OpenKV -> Answer
//
// A failed request is answered with a 4xx or 5xx status and an Answer whose Error states the reason.
package admin

import (
	"cmp"
	"fmt"
	"time"

	"jbofd/internal/uuid"
)

// Version is the version of this API and of its JSON. Fields may be added but are never renamed or removed.
const Version = "jbofd/v1"

// Paths of the API.
const (
	PathStatus          = "/v1/status"
	PathSSDs            = "/v1/ssds"
	PathSubsystems      = "/v1/subsystems"
	PathConnections     = "/v1/connections"
	PathTenants         = "/v1/tenants"
	PathReload          = "/v1/reload"
	PathNamespaceDelete = "/v1/namespaces/delete"
	PathSwap            = "/v1/swap"
	PathSwapDiscard     = "/v1/swap/discard"
	PathKVAudits        = "/v1/kv/audits"
	PathKVAudit         = "/v1/kv/audit"
	PathKVScrubs        = "/v1/kv/scrubs"
	PathKVScrub         = "/v1/kv/scrub"
	PathKVOpen          = "/v1/kv/open"
	PathKVExport        = "/v1/kv/export"
	PathKVImport        = "/v1/kv/import"
)

// Answer is the answer to a request that changes something.
type Answer struct {
	APIVersion string `json:"apiVersion"`
	// Error is empty if the change was made.
	Error string `json:"error,omitempty"`
}

// ParamDryRun is the query parameter of PathReload that asks what a reload would change, or why it would be refused.
const ParamDryRun = "dryRun"

// Reload lists what a reload has changed or would change.
type Reload struct {
	APIVersion string   `json:"apiVersion"`
	DryRun     bool     `json:"dryRun"`
	Changes    []Change `json:"changes"`
}

// Change is one change of a reload.
type Change struct {
	// What is the kind of change, for example "namespace added" or "log level".
	What string `json:"what"`
	// Name is the name of the subsystem or tenant, or the new value of a setting.
	Name string `json:"name,omitempty"`
	// NSID and SizeBytes describe a namespace after the change.
	NSID      uint32 `json:"nsid,omitempty"`
	SizeBytes int64  `json:"sizeBytes,omitempty"`
}

// Addresses are the addresses that a node listens on.
type Addresses struct {
	// Metrics and Discovery are empty if there is no such server.
	Metrics   string   `json:"metrics"`
	Discovery string   `json:"discovery"`
	Listeners []string `json:"listeners"`
}

// Reason is one reason for which a node is not ready.
type Reason struct {
	// Component is the component that is not ready, for example "daemon" or "ssd ssd0".
	Component string `json:"component"`
	Reason    string `json:"reason"`
}

// Status describes a node as a whole.
type Status struct {
	APIVersion string    `json:"apiVersion"`
	Version    string    `json:"version"`
	Node       string    `json:"node"`
	Addresses  Addresses `json:"addresses"`
	// Ready reports that hosts can connect and every drive serves I/O. Otherwise Reasons states why not.
	Ready   bool     `json:"ready"`
	Reasons []Reason `json:"reasons"`
	// Degraded states what does not work although the node may be ready: drives that take requests and complete none.
	Degraded []Reason `json:"degraded,omitempty"`
	// Connections, Controllers and Hosts count those connected now.
	Connections int `json:"connections"`
	Controllers int `json:"controllers"`
	Hosts       int `json:"hosts"`
	// BufferBytesInUse is the amount of data buffers that commands hold.
	BufferBytesInUse int64 `json:"bufferBytesInUse"`
	// Change is the change that is being made, for which all others wait, reloads among them. Absent: none.
	Change *RunningChange `json:"change,omitempty"`
}

// RunningChange is a reload, a deletion of a namespace or another change of the configuration or of drives that is
// under way.
type RunningChange struct {
	What string `json:"what"`
	// RunningMS is for how long it has been running, in milliseconds.
	RunningMS int64 `json:"runningMS"`
	// DoneBytes of TotalBytes are erased, or emptied, as Doing says, if it does such a thing.
	Doing      string `json:"doing,omitempty"`
	DoneBytes  int64  `json:"doneBytes,omitempty"`
	TotalBytes int64  `json:"totalBytes,omitempty"`
}

// String says what the change is and how far.
func (c *RunningChange) String() string {
	s := fmt.Sprintf("%s, for %v", c.What, (time.Duration(c.RunningMS) * time.Millisecond).Round(time.Second))
	if c.TotalBytes > 0 {
		const mib = 1 << 20
		s += fmt.Sprintf(", %d of %d MiB (%d %%) %s", c.DoneBytes/mib, c.TotalBytes/mib,
			c.DoneBytes*100/c.TotalBytes, cmp.Or(c.Doing, "erased"))
	}
	return s
}

// List is the answer to a request for a list.
type List[T any] struct {
	APIVersion string `json:"apiVersion"`
	Items      []T    `json:"items"`
}

// SSD describes one drive. If Error is set, the daemon cannot serve the drive. If it never could, all fields except the
// name may be empty.
type SSD struct {
	Name      string `json:"name"`
	Backend   string `json:"backend"`
	Path      string `json:"path,omitempty"`
	Engine    string `json:"engine"`
	SizeBytes int64  `json:"sizeBytes"`
	// FreeBytes is the space outside of extents.
	FreeBytes int64    `json:"freeBytes"`
	Error     string   `json:"error,omitempty"`
	UUID      string   `json:"uuid,omitempty"` // in the label
	Extents   []Extent `json:"extents"`
	// Policy is the name of the scheduling policy.
	Policy string `json:"policy,omitempty"`
	// CongestionState is the load of the drive as the policy sees it: underutilised, avoidance, congested or
	// overloaded. WriteCost is the cost of a written byte in read bytes. A policy that measures neither reports
	// underutilised and 0.
	CongestionState string  `json:"congestionState,omitempty"`
	WriteCost       float64 `json:"writeCost"`
	// Health is what the drive says of itself; nil if it does not say anything.
	Health *Health `json:"health,omitempty"`
	// Memory is the memory that the drive has beside its namespaces.
	Memory []Memory `json:"memory,omitempty"`
	// ActiveTenants is the number of tenants that have commands waiting or outstanding.
	ActiveTenants int `json:"activeTenants"`
}

// Tenant describes one tenant at one drive: a configured tenant, or a connected host that belongs to none.
type Tenant struct {
	Name string `json:"name"`
	SSD  string `json:"ssd"`
	// Configured reports that the tenant is part of the current configuration.
	Configured bool     `json:"configured"`
	Hosts      []string `json:"hosts"`
	// Connections counts the connections of the tenant's hosts to all drives.
	Connections int `json:"connections"`
	Weight      int `json:"weight"`
	// The rate limits at this drive; 0 stands for no limit. A megabyte has 1024 * 1024 bytes.
	RWIOsPerSec    int64 `json:"rwIOsPerSec"`
	RWMBytesPerSec int64 `json:"rwMBytesPerSec"`
	RMBytesPerSec  int64 `json:"rMBytesPerSec"`
	WMBytesPerSec  int64 `json:"wMBytesPerSec"`
	// The same limits in bytes per second.
	RWBytesPerSec int64 `json:"rwBytesPerSec"`
	RBytesPerSec  int64 `json:"rBytesPerSec"`
	WBytesPerSec  int64 `json:"wBytesPerSec"`
	// Share is the tenant's part of the recent usage of the drive, 0 to 1.
	Share float64 `json:"share"`
	// Credit is how much the tenant should have outstanding at most, in units of 4 KiB, and CreditBytes is the same in
	// bytes. They are 0 if the policy sets no limit.
	Credit      int   `json:"credit"`
	CreditBytes int64 `json:"creditBytes"`
	// Queued is the number of commands that wait for the drive. Inflight is the number of commands that are at the
	// drive or wait for their data.
	Queued   int `json:"queued"`
	Inflight int `json:"inflight"`
	// LimitedBy is the reason why queued commands wait now: none, cap, share, ssd_congested or credit.
	LimitedBy string `json:"limitedBy"`
}

// Extent is one extent of a drive.
type Extent struct {
	UUID        string `json:"uuid"`
	Use         string `json:"use"`
	StartBytes  int64  `json:"startBytes"`
	LengthBytes int64  `json:"lengthBytes"`
	NSID        uint32 `json:"nsid"`
	SubNQN      string `json:"subNQN"`
	// Configured reports that a namespace of the current configuration uses the extent.
	Configured bool `json:"configured"`
}

// Subsystem describes one subsystem of the current configuration.
type Subsystem struct {
	SubNQN       string      `json:"subNQN"`
	AllowAnyHost bool        `json:"allowAnyHost"`
	Hosts        []string    `json:"hosts"`
	Namespaces   []Namespace `json:"namespaces"`
}

// Namespace describes one namespace of a subsystem.
type Namespace struct {
	NSID      uint32 `json:"nsid"`
	SSD       string `json:"ssd"`
	SizeBytes int64  `json:"sizeBytes"`
	// Type is block or kv. For a namespace that is no longer configured, it is the type recorded for its extent.
	Type string `json:"type"`
	// BlockSizeBytes is 0 for key-value namespaces.
	BlockSizeBytes int `json:"blockSizeBytes"`
	// Objects is the number of keys, and UsedBytes the space that they take, for key-value namespaces.
	Objects   int64 `json:"objects,omitempty"`
	UsedBytes int64 `json:"usedBytes,omitempty"`
	// SwappedKeys is the number of keys whose newest values are temporarily in swap areas on other drives.
	SwappedKeys int64 `json:"swappedKeys,omitempty"`
	// Error is the reason why hosts cannot see the namespace, if they cannot. Loss describes it if the reason is that a
	// key-value namespace has lost writes since its last checkpoint.
	Error string  `json:"error,omitempty"`
	Loss  *KVLoss `json:"loss,omitempty"`
	// UUID is empty if the drive of the namespace is not served.
	UUID string `json:"uuid"`
	// Replicated reports that the namespace is a partition of the cluster.
	Replicated bool `json:"replicated,omitempty"`
	// Hosts lists the hosts that may see the namespace. Empty stands for all hosts of the subsystem.
	Hosts []string `json:"hosts"`
}

// Connection describes one connection: a queue of a host's controller.
type Connection struct {
	ID          uint64    `json:"id"`
	Transport   string    `json:"transport"`
	Local       string    `json:"local"`
	Remote      string    `json:"remote"`
	HostNQN     string    `json:"hostNQN"`
	SubNQN      string    `json:"subNQN"`
	CNTLID      uint16    `json:"cntlid"`
	QID         uint16    `json:"qid"`
	Entries     int       `json:"queueSize"`
	Outstanding int       `json:"outstanding"`
	Since       time.Time `json:"since"`
}

// DeleteNamespace requests that the extent of a namespace that is no longer configured be freed. Its data is lost.
type DeleteNamespace struct {
	UUID string `json:"uuid"`
}

// SwapArea describes a swap area: one on a drive, or one that namespaces need and no served drive has.
type SwapArea struct {
	UUID string `json:"uuid"`
	// SSD and the sizes are empty if no served drive has the area.
	SSD       string `json:"ssd"`
	SizeBytes int64  `json:"sizeBytes"`
	// UsedBytes is the part of the area's log that is in use.
	UsedBytes int64 `json:"usedBytes"`
	// State is open, retiring (no longer configured, accepts no new records), failed or missing.
	State string `json:"state"`
	// Error is the reason of the state failed.
	Error string `json:"error,omitempty"`
	// Sources lists the source partitions: the namespaces that have, or may have, keys in the area. They do not open
	// without the area.
	Sources []SwapSource `json:"sources"`
}

// SwapSource describes a source partition: a namespace with keys in a swap area.
type SwapSource struct {
	// UUID identifies the namespace. The other fields are empty if no served drive has the namespace.
	UUID   string `json:"uuid"`
	SubNQN string `json:"subNQN"`
	NSID   uint32 `json:"nsid"`
	// Open reports that the namespace is served, and returns its keys to its own drive when that drive has capacity to
	// spare.
	Open bool `json:"open"`
	// Keys is the number of its keys in the area; 0 if unknown.
	Keys int `json:"keys"`
}

// DiscardSwap requests that a swap area be given up with all records in it.
type DiscardSwap struct {
	UUID string `json:"uuid"`
}

// KVLoss describes writes that a key-value namespace has acknowledged and lost. A segment has the keys of one place of
// the table, and every write of a key writes a segment.
type KVLoss struct {
	// Statement says what is lost. Token stands for it in OpenKV.
	Statement string `json:"statement"`
	Token     string `json:"token"`
	// MissingSegments and FoundSegments count the segments written since the last checkpoint that are known to be
	// missing, and those that are there.
	MissingSegments int64 `json:"missingSegments"`
	FoundSegments   int64 `json:"foundSegments"`
}

// OpenKV requests that a key-value namespace be opened although it has lost writes.
type OpenKV struct {
	UUID string `json:"uuid"`
	// AcceptLoss is the Token of the loss.
	AcceptLoss string `json:"acceptLoss"`
}

// AuditKV requests that every segment of a key-value namespace be looked at. The answer comes when that is done.
type AuditKV struct {
	UUID string `json:"uuid"`
	// Repair gives up what is lost.
	Repair bool `json:"repair"`
}

// KVAudit describes the audit of a key-value namespace that is running, or the last one since the namespace was opened.
type KVAudit struct {
	APIVersion string `json:"apiVersion,omitempty"`
	UUID       string `json:"uuid"`
	SubNQN     string `json:"subNQN"`
	NSID       uint32 `json:"nsid"`
	// Running reports that it has not ended: LookedAt of Segments are done.
	Running  bool   `json:"running"`
	Repair   bool   `json:"repair"`
	LookedAt uint32 `json:"lookedAt"`
	Segments uint32 `json:"segments"`
	// LossySegments have lost keys, UnreadableSegments could not be read. RepairedSegments had lost keys that were
	// given up.
	LossySegments      uint32 `json:"lossySegments"`
	UnreadableSegments uint32 `json:"unreadableSegments"`
	RepairedSegments   uint32 `json:"repairedSegments"`
	// KnownKeys are keys of lossy and repaired segments that exist. LostKeys were given up.
	KnownKeys int64 `json:"knownKeys"`
	LostKeys  int64 `json:"lostKeys"`
	// FreedChunks were damaged and are used again. DamagedChunks have live records that cannot be found.
	FreedChunks   int `json:"freedChunks"`
	DamagedChunks int `json:"damagedChunks"`
}

// ScrubKV requests another rate of the scrub of a key-value namespace, until the namespace is opened again.
type ScrubKV struct {
	UUID string `json:"uuid"`
	// BytesPerSec is 0 for a pause.
	BytesPerSec int64 `json:"bytesPerSec"`
}

// KVScrub describes the scrub of a key-value namespace, which reads all chunks again and again, in passes.
type KVScrub struct {
	APIVersion string `json:"apiVersion,omitempty"`
	UUID       string `json:"uuid"`
	SubNQN     string `json:"subNQN"`
	NSID       uint32 `json:"nsid"`
	// BytesPerSec is the rate; 0: it does nothing.
	BytesPerSec int64 `json:"bytesPerSec"`
	// Chunk of Chunks is read now. Passes have ended since the namespace was opened.
	Chunk  int64 `json:"chunk"`
	Chunks int64 `json:"chunks"`
	Passes int64 `json:"passes"`
	// Present is what the present pass has found so far, Last what the one before has, if there was one.
	Present KVScrubPass `json:"present"`
	Last    KVScrubPass `json:"last"`
	// KnownLosses, of a partition of the cluster, are things that are lost and were not repaired yet.
	KnownLosses int `json:"knownLosses"`
}

// KVScrubPass is what a pass has found.
type KVScrubPass struct {
	Seconds int64 `json:"seconds"`
	// Damaged counts damaged records, by whatever they were found, and UnreadableBlocks blocks.
	Damaged          int64 `json:"damaged"`
	UnreadableBlocks int64 `json:"unreadableBlocks"`
}

// ParseUUID parses a UUID in the format of this API.
func ParseUUID(s string) ([16]byte, error) {
	u, err := uuid.Parse(s)
	return [16]byte(u), err
}
