// Package cluster is the membership of a node and the manager of its cluster, as a state machine. It has no I/O: it
// asks for requests to etcd, sends messages to the other nodes, and says what the node may serve, and until when.
//
//	    etcd: config, manager, stamp, view, nodes/<name>
//	     ↑ view by compare-and-swap     ↑ registration, takeover
//	     │ stamp                        │
//	  manager <──────── Report ─────── node       what it has, what it has seen; a promise
//	(one of them) ───── Answer ──────> node       the view, and authority
//
// Every node reports to the manager ten times in a lease. An answer gives authority for half a lease, counted by the
// node from the moment at which it sent the report. The manager gives up a node that is silent for a lease, which is
// after the end of its authority, and writes the next view, which view.Next computes.
//
// A view that is written does not act yet. The nodes that it admits first confirm in their reports that they have seen
// it: from then on they do not serve what it takes from them. When all have confirmed, or have been silent for longer
// than their authority lasts, the manager says that the view acts.
//
// The manager may give authority as long as it can prove that no other manager makes a view without its nodes. One of
// two proofs is enough, each for half a lease from when its request was sent: etcd has confirmed its stamp; or all
// nodes that the view admits have promised not to act as a manager (a report is such a promise). So nothing stops when
// etcd is away for all, and the map is frozen. docs/decisions/0014-cluster-etcd.md has the whole argument.
//
// Leases of etcd keep registrations, and decide nothing else: a lease that etcd has revoked by mistake is only a
// registration to be made again.
//
// Node is the machine: node.go has what each node does, manager.go what the manager does besides, etcd.go what a node
// knows of etcd and keeps there, unserved.go when a manager is replaced that is not heard, forget.go how a node
// leaves the map. The formats are in record.go (etcd) and message.go (between nodes).
package cluster

import (
	"errors"

	"jbofd/internal/cluster/view"
	"jbofd/internal/uuid"
)

// Protocol is the version of the records and messages of this package, and of the commands of nodes to each other
// (docs/wire-extensions.md, bit 5). All nodes of a cluster have the same one. A change of their form needs another
// number, on which TestAnotherWireFormHasAnotherNumber insists.
const Protocol = 3

// Problems that keep a node from taking part, or from changing anything. Each has its way out in Node.Problem.
var (
	// ErrUnreachable: etcd has not answered since the start. The node serves nothing.
	ErrUnreachable = errors.New("etcd does not answer")
	// ErrNoCluster: etcd has no cluster of that name.
	ErrNoCluster = errors.New("no cluster of this name")
	// ErrForeign: the records are not those of this cluster, or no records of this program.
	ErrForeign = errors.New("records of something else")
	// ErrProtocol: the cluster has another protocol version than this program.
	ErrProtocol = errors.New("another protocol version")
	// ErrDuplicateName: another node has this node's name.
	ErrDuplicateName = errors.New("another node has this name")
	// ErrWentBack: etcd has an older state than one that was seen before, as after a backup was restored.
	ErrWentBack = errors.New("etcd has gone back to an earlier state")
)

// Incarnation identifies a process of a node, never 0. The upper 40 bits are a random number of the node's state
// directory, which a process locks. The lower 24 bits count the processes that have had it; the count is durable before
// a process uses it.
type Incarnation uint64

// processBits is the length of the count.
const processBits = 24

// NewIncarnation returns the incarnation of a process: the first one of a node has the number 1.
func NewIncarnation(node uint64, process uint32) Incarnation {
	return Incarnation(node<<processBits | uint64(process)&(1<<processBits-1))
}

// follows reports whether o is an earlier process of the same node. It has ended then.
func (i Incarnation) follows(o Incarnation) bool {
	return i>>processBits == o>>processBits && i > o && o != 0
}

// Config describes a Node.
type Config struct {
	// Cluster is the UUID in the labels of the node's drives; zero if they have none yet.
	Cluster uuid.UUID
	// Name is that of the node, Domain its failure domain, Address where other nodes reach it.
	Name, Domain, Address string
	Incarnation           Incarnation
	// Seen is the newest epoch that an earlier process has seen. Driver: store Newest().Epoch when it grows.
	Seen view.Epoch
	// Partitions are those of the node.
	Partitions []Partition
	// LeaseNS is how long a node may be silent before the manager gives it up. All nodes have the same; 0: one second.
	LeaseNS int64
	// AwayNS is how long a node may be gone before its ranges are given to others for good; 0: ten minutes.
	AwayNS int64
	// Nodes is how many nodes the configuration has: see Node.awaitsOthers. 0: unknown.
	Nodes int
}

// Partition is a key-value store of a node.
type Partition struct {
	ID uuid.UUID
	// Weight is how much it is to hold, in proportion to others: GiB.
	Weight uint32
}

// Clocks of two nodes differ in rate by at most this fraction of 1000. Those of real machines differ by less than a
// tenth of it.
const driftPerMille = 10

// Request is a request to etcd. The driver answers each with Node.Answered: with an error if etcd has not answered in
// time (package etcd: one and a half of its Timeout, 3 s); then its outcome is unknown, and it may still take effect
// later.
type Request struct {
	Tag  uint64
	Kind RequestKind
	// If and Then are those of a Txn: all comparisons must hold.
	If   []Compare
	Then []Put
	// Lease is that of KeepAlive; TTLNS is that of Lease.
	Lease int64
	TTLNS int64
}

// RequestKind is what a Request does.
type RequestKind uint8

// Requests. All are linearizable.
const (
	// Read reads all keys of the cluster.
	Read RequestKind = iota
	// Txn compares and puts.
	Txn
	// Lease makes a lease.
	Lease
	// KeepAlive renews a lease.
	KeepAlive
)

// Compare holds if a key was last modified at a revision; 0: the key does not exist.
type Compare struct {
	Key      string
	Revision int64
}

// Put writes a key. Keys are relative to the prefix of the cluster.
type Put struct {
	Key   string
	Value []byte
	// Lease removes the key when it ends; 0: none.
	Lease int64
}

// Response answers a Request.
type Response struct {
	Tag uint64
	// Err: the outcome is unknown.
	Err error
	// Revision is etcd's at the time of the request.
	Revision int64
	// Done: the comparisons of a Txn hold; the lease of a KeepAlive exists.
	Done bool
	// Keys are those that were read.
	Keys  []KeyValue
	Lease int64
}

// KeyValue is a key as it was read, or a change of it.
type KeyValue struct {
	Key   string
	Value []byte
	// Revision is that of its last modification.
	Revision int64
	Deleted  bool
}

// Message is a Report or an Answer.
type Message struct {
	Report *Report
	Answer *Answer
}

// Report is a node's report to the manager. It is a promise (docs/decisions/0014, rules 3 and 5): let t be the time at
// which the node received the stamp that it echoes. If the node becomes the manager, it gives up no node that has not
// reported to it before t plus one lease. The manager may therefore grant authority until half a lease after it has
// sent that stamp; a grant lasts for half a lease more.
type Report struct {
	Term uint64
	Seq  uint64
	// Echo is the Stamp of the last answer of this term, 0 if there was none.
	Echo          int64
	Cluster       uuid.UUID
	Protocol      uint16
	Name, Address string
	Incarnation   Incarnation
	// Seen is the epoch of the newest view that the node has seen. It does not serve ranges that this view takes from
	// it.
	Seen view.Epoch
	// Connected: the node acts on that view, and is connected to all nodes that it admits, as their host and as a
	// target.
	Connected bool
	// Version counts the changes of the Holdings, which are there only if Full is set: if the manager has an older
	// version.
	Version uint64
	Full    bool
	Holdings
}

// Holdings are the ranges that a node has in its partitions, and the state of these.
type Holdings struct {
	Ranges []RangeReport
	// Unusable are partitions that cannot be used.
	Unusable []view.PartitionID
	// Failing are partitions whose drive does not work at present: it fails writes, or completes nothing. Their data
	// may be readable, but they are not filled. See trouble.
	Failing []view.PartitionID
}

// RangeReport is the state of a range in one of the partitions of a node.
type RangeReport struct {
	Partition view.PartitionID
	Range     int
	view.Report
}

// Answer is the manager's answer to a Report. With a Seq of 0 it answers no report: it tells the node who the manager
// is, or that there is a newer view.
type Answer struct {
	Term    uint64
	Manager Identity
	// To is the incarnation that the answer is for.
	To  Incarnation
	Seq uint64
	// Stamp is the manager's clock in nanoseconds.
	Stamp int64
	// Epoch is that of the newest view. Acts: it acts. Granted: the node has authority.
	Epoch         view.Epoch
	Acts, Granted bool
	// Ready: the view acts, and all nodes that it admits say that they are Connected.
	Ready bool
	// Version is Report.Version of the node's Holdings that the manager has.
	Version uint64
	// View is the record of the newest view, if the node has not seen it.
	View []byte
	// Refused says why the manager refuses the node.
	Refused Refusal
}

// Identity identifies a process of a node.
type Identity struct {
	Name, Address string
	Incarnation   Incarnation
}

// Refusal is the reason why a manager refuses a node.
type Refusal uint8

// Refusals.
const (
	NotRefused Refusal = iota
	OtherCluster
	OtherProtocol
	NameTaken
	NodeForgotten
)

// Send is a message to a node. Messages may be lost, duplicated, delayed and reordered.
type Send struct {
	To      string // address
	Message Message
}

// Actions are what the driver has to do after a call, in this order. The driver empties the struct.
type Actions struct {
	// Changed: Serves, Active, Newest or Authority may differ from before. The driver must stop serving what the node
	// does not serve any more before it carries out Sends, because other nodes rely on that.
	Changed bool
	// Problem: Problem differs from before.
	Problem bool
	// Watch begins a watch of all keys from revision From, which replaces an earlier one.
	Watch    *Watch
	Requests []Request
	Sends    []Send
	// WakeNS is when Wake is to be called at the latest.
	WakeNS int64
}

// Watch is a watch of etcd. Its events go to Node.Watched with its ID.
type Watch struct {
	ID   uint64
	From int64
}

// HostNQN is the NQN under which a node connects to the targets of the other nodes of its cluster, as a host.
func HostNQN(cluster, node string) string {
	return "nqn.2026-11.example.jbofd:node:" + cluster + ":" + node
}
