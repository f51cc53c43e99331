package pipeline

import "jbofd/internal/credit"

// Tenant is a tenant's number at an SSD: small and dense, so that it indexes
// slices. Who drives the pipeline gives them out.
type Tenant uint32

// Class is how an operation loads an SSD.
type Class uint8

// Classes.
const (
	ReadClass  Class = iota // moves data out
	WriteClass              // moves data in
	OtherClass              // moves no data: flush, deallocate, write zeroes
	// Classes is how many there are.
	Classes
)

var classNames = [Classes]string{"read", "write", "other"}

// String returns the class's name as metrics write it.
func (c Class) String() string { return classNames[c] }

// Class returns the class of the operation. A CompareWrite counts as the write
// that it is when it succeeds.
func (o Op) Class() Class {
	switch o {
	case Read, Compare, Verify:
		return ReadClass
	case Write, CompareWrite:
		return WriteClass
	}
	return OtherClass
}

// Tag names one I/O between Enqueue and Complete. The caller chooses tags, each at
// most once at a time, and small: they index slabs.
type Tag uint32

// IO is what a policy needs to know of a request. It has four fields, for the compiler
// keeps no larger struct in registers: a fifth would double the cost of an I/O.
type IO struct {
	Tag    Tag
	Tenant Tenant
	Op     Op
	// LenBytes is the size of the transfer or range; 0 for a flush.
	LenBytes int64
}

// Units is what an I/O counts for against a credit. Its host counts the data that it sends
// or gets, whatever the range.
//
// hot: 0 allocs
func (io IO) Units() int {
	if io.Op == Verify || io.Op.Class() == OtherClass {
		return credit.Units(0)
	}
	return credit.Units(int(io.LenBytes))
}

// Result is how an I/O ended.
type Result struct {
	// LatencyNS is the time it spent at the device, 0 if it never came there.
	LatencyNS int64
	// Failed: it did not do what it was for; its latency says nothing about the SSD's load.
	Failed bool
}

// Limit is what keeps a tenant's queued I/O from the device.
type Limit uint8

// Limits.
const (
	// Unlimited: nothing of the tenant's is queued, or it may go.
	Unlimited Limit = iota
	// LimitCap: the tenant's configured cap.
	LimitCap
	// LimitShare: others have a right to the SSD before it.
	LimitShare
	// LimitSSD: the SSD is congested; the tenant has not had its share.
	LimitSSD
	// LimitCredit: nothing of the tenant's is queued, for its hosts keep commands back: they
	// have outstanding what they may have.
	LimitCredit
	// Limits is how many there are.
	Limits
)

var limitNames = [Limits]string{"none", "cap", "share", "ssd_congested", "credit"}

// String returns the reason's name as metrics write it.
func (l Limit) String() string { return limitNames[l] }

// Policy decides which queued I/O goes to the device next. It is a machine:
// no clock, no lock, one goroutine at a time. An I/O is queued from Enqueue to
// Dispatch or Cancel and in flight from Dispatch to Complete. now never decreases.
//
// Calls name tenants announced by SetTenant. Calls that do not fit an I/O's state
// are bugs of the caller and panic or are ruled out by it.
type Policy interface {
	// Name is the policy's name in the configuration.
	Name() string
	// SetTenant announces a tenant, or changes its weight (at least 1). A tenant is
	// known until RemoveTenant, which comes when it has nothing queued or in flight.
	SetTenant(now int64, t Tenant, weight int)
	RemoveTenant(now int64, t Tenant)
	// Enqueue queues io.
	Enqueue(now int64, io IO)
	// Cancel takes a queued I/O out. Its tag is free.
	Cancel(now int64, tag Tag)
	// Dispatch appends the I/Os that may go to the device now, in order.
	Dispatch(now int64, dst []Tag) []Tag
	// Pause says that a dispatched I/O waits for something other than the SSD, memory
	// or its host's data: its place at the device is free meanwhile. A host that never
	// sends its data would otherwise stop all others. Resume ends that: the I/O goes to
	// the device at once, for which later ones wait.
	Pause(now int64, tag Tag)
	Resume(now int64, tag Tag)
	// Complete ends an I/O in flight, paused or not. Its tag is free.
	Complete(now int64, tag Tag, r Result)
	// NextWake is the time at which Dispatch may have more without any event before
	// it; ok is false if there is none.
	NextWake() (at int64, ok bool)
	// Credit is what the tenant should have outstanding at most, queued and in flight,
	// in units of 4 KiB as the tenant's I/Os have cost lately; 0 if the policy does not
	// say.
	Credit(t Tenant) int
	// Limit tells what keeps the tenant's first queued I/O from the device.
	Limit(t Tenant) Limit
	// CostNS is the device time charged to the tenant since it was announced; a policy
	// that counts in other units gives those. Only ratios matter.
	CostNS(t Tenant) int64
	// Stats writes the policy's view of the SSD.
	Stats(s *Stats)
}

// State is a congestion state, in order of load.
type State uint8

// States.
const (
	Underutilised State = iota
	Avoidance
	Congested
	Overloaded
	// States is how many there are.
	States
)

var stateNames = [States]string{"underutilised", "avoidance", "congested", "overloaded"}

// String returns the state's name as metrics write it.
func (s State) String() string { return stateNames[s] }

// ClassStats is one class's latency monitor.
type ClassStats struct {
	// LatencyNS is the averaged latency at the device, ThresholdNS above which it counts
	// as congested.
	LatencyNS, ThresholdNS int64
	State                  State
}

// Worst is the state of the class that is loaded most.
func (s *Stats) Worst() (worst State) {
	for _, c := range s.Class {
		worst = max(worst, c.State)
	}
	return worst
}

// Stats are a policy's view of an SSD. What a policy does not have is zero.
type Stats struct {
	// WriteCost is what a written byte costs, in read bytes.
	WriteCost float64
	// TargetBytesPerSec is the rate that the policy lets through, CompletedBytesPerSec
	// what the device has completed lately.
	TargetBytesPerSec, CompletedBytesPerSec float64
	// Class is indexed by Class; OtherClass has none.
	Class [Classes]ClassStats
	// InflightNS is the device time outstanding, WindowNS its limit.
	InflightNS, WindowNS int64
	// ActiveTenants have I/Os queued or in flight.
	ActiveTenants int
}
