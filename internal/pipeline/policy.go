package pipeline

import (
	"jbofd/internal/credit"
	"jbofd/internal/tenant"
)

// Class groups operations by the load that they put on an SSD.
type Class uint8

// Classes.
const (
	ReadClass  Class = iota // moves data out
	WriteClass              // moves data in
	OtherClass              // moves no data: flush, deallocate, write zeroes
	// Classes is the number of classes.
	Classes
)

var classNames = [Classes]string{"read", "write", "other"}

// String returns the class's name as metrics write it.
func (c Class) String() string { return classNames[c] }

// Class returns the class of the operation. CompareWrite is a WriteClass operation, because that is what it costs when
// the comparison succeeds.
func (o Op) Class() Class {
	switch o {
	case Read, Compare, Verify:
		return ReadClass
	case Write, CompareWrite:
		return WriteClass
	}
	return OtherClass
}

// Tag identifies an I/O from Enqueue to Complete. The caller chooses tags; no two I/Os may have the same tag at a time.
// Tags index slabs, so they should be small.
type Tag uint32

// IO describes a request to a policy. It has four fields because the compiler keeps structs of up to four fields in
// registers: a fifth would double the cost of an I/O.
type IO struct {
	Tag    Tag
	Tenant tenant.ID
	Op     Op
	// LenBytes is the size of the transfer or range; 0 for a flush.
	LenBytes int64
}

// Units returns how many units the I/O takes of its tenant's credit. Hosts count the data that they transfer, so
// operations without a transfer count as the smallest one, whatever their range.
//
// hot: 0 allocs
func (io IO) Units() int {
	if io.Op == Verify || io.Op.Class() == OtherClass {
		return credit.Units(0)
	}
	return credit.Units(int(io.LenBytes))
}

// Result is the outcome of an I/O.
type Result struct {
	// LatencyNS is the time that the I/O spent at the device; 0 if it was never submitted.
	LatencyNS int64
	// Failed is set if the I/O did not succeed. Its latency then says nothing about the load of the SSD.
	Failed bool
}

// Limit is the reason why a tenant's queued I/O is not dispatched.
type Limit uint8

// Limits.
const (
	// Unlimited: the tenant has no I/O queued, or its first one may be dispatched.
	Unlimited Limit = iota
	// LimitCap: the tenant has reached its configured cap.
	LimitCap
	// LimitShare: it is the turn of other tenants.
	LimitShare
	// LimitSSD: it is the tenant's turn, but the SSD is congested.
	LimitSSD
	// LimitCredit: the tenant has no I/O queued because its hosts hold commands back: as much as its credit allows is
	// outstanding.
	LimitCredit
	// Limits is the number of limits.
	Limits
)

var limitNames = [Limits]string{"none", "cap", "share", "ssd_congested", "credit"}

// String returns the reason's name as metrics write it.
func (l Limit) String() string { return limitNames[l] }

// Policy decides which queued I/O goes to the device next. It is a state machine: it has no clock and no lock, and one
// goroutine at a time may call it. An I/O is queued from Enqueue to Dispatch or Cancel, and in flight from Dispatch to
// Complete. now never decreases.
//
// Callers may name only tenants that SetTenant has announced. A call that does not fit the state of the I/O is a bug of
// the caller: a policy may panic.
type Policy interface {
	// Name is the policy's name in the configuration.
	Name() string
	// SetTenant announces a tenant, or changes its weight (at least 1). A tenant is
	// known until RemoveTenant, which comes when it has nothing queued or in flight.
	SetTenant(now int64, t tenant.ID, weight int)
	RemoveTenant(now int64, t tenant.ID)
	// Enqueue queues io.
	Enqueue(now int64, io IO)
	// Cancel removes a queued I/O and frees its tag.
	Cancel(now int64, tag Tag)
	// Dispatch appends the I/Os that may go to the device now, in order, to dst.
	Dispatch(now int64, dst []Tag) []Tag
	// Pause tells the policy that a dispatched I/O waits for something other than the SSD: memory, or data from its
	// host. The policy gives its place at the device to others meanwhile; otherwise a host that never sends its data
	// would stop all other hosts. Resume ends the pause. The I/O then goes to the device at once, and I/Os dispatched
	// later make room for it.
	Pause(now int64, tag Tag)
	Resume(now int64, tag Tag)
	// Complete ends an I/O in flight, paused or not, and frees its tag.
	Complete(now int64, tag Tag, r Result)
	// NextWake returns the time at which Dispatch should be called again if no other event comes before. ok is false if
	// there is no such time.
	NextWake() (at int64, ok bool)
	// Credit returns how much the tenant should have outstanding at most, queued and in flight, in units of 4 KiB. It
	// depends on what the tenant's I/Os have cost lately. 0 means that the policy does not compute credits.
	Credit(t tenant.ID) int
	// Limit returns why the tenant's first queued I/O is not dispatched.
	Limit(t tenant.ID) Limit
	// CostNS returns the device time charged to the tenant since it was announced. A policy may count in other units:
	// only ratios between tenants matter.
	CostNS(t tenant.ID) int64
	// Stats writes the policy's view of the SSD.
	Stats(s *Stats)
}

// State is a congestion state. States are ordered by load.
type State uint8

// States.
const (
	Underutilised State = iota
	Avoidance
	Congested
	Overloaded
	// States is the number of states.
	States
)

var stateNames = [States]string{"underutilised", "avoidance", "congested", "overloaded"}

// String returns the state's name as metrics write it.
func (s State) String() string { return stateNames[s] }

// ClassStats is the state of the latency monitor of a class.
type ClassStats struct {
	// LatencyNS is the averaged latency at the device. Above ThresholdNS it counts as congested.
	LatencyNS, ThresholdNS int64
	State                  State
}

// Worst returns the state of the most loaded class.
func (s *Stats) Worst() (worst State) {
	for _, c := range s.Class {
		worst = max(worst, c.State)
	}
	return worst
}

// Stats is a policy's view of an SSD. Fields that the policy does not compute are zero.
type Stats struct {
	// WriteCost is the cost of a written byte in read bytes.
	WriteCost float64
	// TargetBytesPerSec is the rate at which the policy dispatches, CompletedBytesPerSec the recent rate of
	// completions.
	TargetBytesPerSec, CompletedBytesPerSec float64
	// Class is indexed by Class; OtherClass has no monitor.
	Class [Classes]ClassStats
	// InflightNS is the outstanding device time, WindowNS its limit.
	InflightNS, WindowNS int64
	// ActiveTenants is the number of tenants with I/Os queued or in flight.
	ActiveTenants int
}
