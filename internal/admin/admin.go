// Package admin is the daemon's local API as both ends see it: the JSON that
// crosses the admin socket, and the client that jbofctl and the demonstration use.
//
// The API is HTTP with JSON over a unix socket that only its owner may open:
//
//	GET  /v1/status             Status
//	GET  /v1/ssds               List[SSD]
//	GET  /v1/subsystems         List[Subsystem]
//	GET  /v1/connections        List[Connection]
//	GET  /v1/tenants            List[Tenant]
//	POST /v1/reload             Answer
//	POST /v1/namespaces/delete  DeleteNamespace -> Answer
//	GET  /v1/swap               List[SwapArea]
//	POST /v1/swap/discard       DiscardSwap -> Answer
//
// A request that fails is answered with a 4xx or 5xx status and an Answer whose
// Error says why.
package admin

import (
	"time"

	"jbofd/internal/nvme"
)

// Version is the version of this API and of its JSON: fields are added, never
// renamed or removed.
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
)

// Answer is what a request for a change gets.
type Answer struct {
	APIVersion string `json:"apiVersion"`
	// Error is empty if it was done.
	Error string `json:"error,omitempty"`
}

// Addresses are where a node listens.
type Addresses struct {
	// Metrics is empty if there is no server; so is Discovery.
	Metrics   string   `json:"metrics"`
	Discovery string   `json:"discovery"`
	Listeners []string `json:"listeners"`
}

// Reason is why a node is not ready.
type Reason struct {
	// Component is what is not ready: "daemon", "ssd ssd0".
	Component string `json:"component"`
	Reason    string `json:"reason"`
}

// Status is a node as a whole.
type Status struct {
	APIVersion string    `json:"apiVersion"`
	Version    string    `json:"version"`
	Node       string    `json:"node"`
	Addresses  Addresses `json:"addresses"`
	// Ready: hosts can connect and every drive serves. Reasons say why not.
	Ready   bool     `json:"ready"`
	Reasons []Reason `json:"reasons"`
	// Connections, Controllers and Hosts count what is connected now.
	Connections int `json:"connections"`
	Controllers int `json:"controllers"`
	Hosts       int `json:"hosts"`
	// BufferBytesInUse is how much of the data buffers commands hold.
	BufferBytesInUse int64 `json:"bufferBytesInUse"`
}

// List is the answer of the lists.
type List[T any] struct {
	APIVersion string `json:"apiVersion"`
	Items      []T    `json:"items"`
}

// SSD is one drive. With Error set the daemon cannot serve it; if it never could,
// all but the name may be empty.
type SSD struct {
	Name      string `json:"name"`
	Backend   string `json:"backend"`
	Path      string `json:"path,omitempty"`
	Engine    string `json:"engine"`
	SizeBytes int64  `json:"sizeBytes"`
	// FreeBytes lie in no extent.
	FreeBytes int64    `json:"freeBytes"`
	Error     string   `json:"error,omitempty"`
	Drive     string   `json:"drive,omitempty"` // UUID in the label
	Extents   []Extent `json:"extents"`
	// Policy is how tenants share it.
	Policy string `json:"policy,omitempty"`
	// CongestionState is how loaded the policy finds it: underutilised, avoidance,
	// congested, overloaded; WriteCost what a written byte costs in read bytes. A policy that
	// does not look at that says underutilised and 0.
	CongestionState string  `json:"congestionState,omitempty"`
	WriteCost       float64 `json:"writeCost"`
	// ActiveTenants have commands waiting or outstanding.
	ActiveTenants int `json:"activeTenants"`
}

// Tenant is one tenant at one drive: a configured one, or a connected host that belongs
// to none.
type Tenant struct {
	Name string `json:"name"`
	SSD  string `json:"ssd"`
	// Configured: it is in the configuration in force.
	Configured bool     `json:"configured"`
	Hosts      []string `json:"hosts"`
	// Connections are those of its hosts, to all drives.
	Connections int `json:"connections"`
	Weight      int `json:"weight"`
	// The caps at this drive; 0 is none. A megabyte has 1024 * 1024 bytes.
	RWIOsPerSec    int64 `json:"rwIOsPerSec"`
	RWMBytesPerSec int64 `json:"rwMBytesPerSec"`
	RMBytesPerSec  int64 `json:"rMBytesPerSec"`
	WMBytesPerSec  int64 `json:"wMBytesPerSec"`
	// Share is its part of what all tenants used of the drive lately, 0 to 1.
	Share float64 `json:"share"`
	// Credit is what it should have outstanding at most, in 4 KiB units; 0: the policy
	// does not say.
	Credit int `json:"credit"`
	// Queued commands wait before the drive, Inflight ones are at it or wait for their data.
	Queued   int `json:"queued"`
	Inflight int `json:"inflight"`
	// LimitedBy is what keeps its queued commands back now: none, cap, share,
	// ssd_congested, credit.
	LimitedBy string `json:"limitedBy"`
}

// Extent is one extent of a drive.
type Extent struct {
	UUID        string `json:"uuid"`
	Use         string `json:"use"`
	StartBytes  int64  `json:"startBytes"`
	LengthBytes int64  `json:"lengthBytes"`
	NSID        uint32 `json:"nsid"`
	NQN         string `json:"nqn"`
	// Configured: a namespace of the configuration in force stands on it.
	Configured bool `json:"configured"`
}

// Subsystem is one subsystem of the configuration in force.
type Subsystem struct {
	NQN          string      `json:"nqn"`
	AllowAnyHost bool        `json:"allowAnyHost"`
	Hosts        []string    `json:"hosts"`
	Namespaces   []Namespace `json:"namespaces"`
}

// Namespace is one namespace of a subsystem.
type Namespace struct {
	NSID      uint32 `json:"nsid"`
	SSD       string `json:"ssd"`
	SizeBytes int64  `json:"sizeBytes"`
	// Type is block or kv, of one left on a drive what its extent is for.
	Type string `json:"type"`
	// BlockSize is 0 for keys and values.
	BlockSize int `json:"blockSize"`
	// Objects and UsedBytes are the keys and what they take, of keys and values.
	Objects   int64 `json:"objects,omitempty"`
	UsedBytes int64 `json:"usedBytes,omitempty"`
	// SwappedKeys are the keys whose newest values are on other drives for the moment.
	SwappedKeys int64 `json:"swappedKeys,omitempty"`
	// Error says why hosts do not see it, if they do not.
	Error string `json:"error,omitempty"`
	// UUID is empty if its drive is not served.
	UUID string `json:"uuid"`
	// Hosts are the only ones that see it; empty: all of the subsystem's.
	Hosts []string `json:"hosts"`
}

// Connection is one connection: a queue of a host's controller.
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

// DeleteNamespace asks to free the extent of a namespace that is not configured
// any more; its data are lost.
type DeleteNamespace struct {
	UUID string `json:"uuid"`
}

// SwapArea is a swap area: of a drive, or one that namespaces need and no drive has.
type SwapArea struct {
	UUID string `json:"uuid"`
	// SSD is empty, and so are the sizes, if no drive that is served has it.
	SSD       string `json:"ssd"`
	SizeBytes int64  `json:"sizeBytes"`
	// UsedBytes of its log are in use.
	UsedBytes int64 `json:"usedBytes"`
	// State is open, retiring (not configured any more: it takes nothing new), failed or missing.
	State string `json:"state"`
	// Error says what is wrong with a failed one.
	Error string `json:"error,omitempty"`
	// Homes are the namespaces that have keys there, or may have some: they do not open without it.
	Homes []SwapHome `json:"homes"`
}

// SwapHome is a namespace with keys in a swap area.
type SwapHome struct {
	// UUID is that of the namespace; the others are empty if no drive that is served has it.
	UUID   string `json:"uuid"`
	SubNQN string `json:"subNQN"`
	NSID   uint32 `json:"nsid"`
	// Open: it is served, and brings its keys home when its drive has time.
	Open bool `json:"open"`
	// Keys are those it has there; 0 if that is not known.
	Keys int `json:"keys"`
}

// DiscardSwap asks to give up a swap area with all that is in it.
type DiscardSwap struct {
	UUID string `json:"uuid"`
}

// ParseUUID reads a UUID as this API writes it.
func ParseUUID(s string) ([16]byte, error) {
	u, err := nvme.ParseUUID(s)
	return [16]byte(u), err
}
