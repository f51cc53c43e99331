// Package flowctl decides when a host of a cluster sends its requests, and reads to which replica: it schedules them by
// the tokens of the SSDs that they go to. It is Algorithm 1 of LEED (SIGCOMM'23), with these additions: a write takes
// tokens of all replicas of its chain, tenants have weights, and the commands that one connection takes are divided
// among the tenants as tokens are.
//
//	Add ──> admission (writes) ──> SSD (tokens) ──> ... ──> SSD ──> Link (places) ──> Next ──> (the target) ──> Ended
//	           │                    │ queues of each tenant          │                          credit of the SSD
//	           └────────────────────┴── deficit round robin ─────────┘
//
// The tokens of an SSD are the units that its latest credit (package credit) allows to be outstanding, less those that
// are. A request waits if it does not fit them, unless nothing is outstanding at that SSD.
//
// A read may go to each of its targets. It goes to the one with the greatest part of its credit left; if none has
// enough, it waits at all of them. A write takes the tokens of its targets one after the other, always in the order in
// which the SSDs were made, and keeps what it has while it waits for the next one. So reads cannot starve it, and
// writes cannot wait for each other in a circle. Then it takes a place of the link to its first target, the ChainHead.
//
// A Machine has no clock and no lock: time comes with each call, in nanoseconds. One goroutine at a time may call it.
// Requests belong to the caller, and nothing is allocated for them.
package flowctl

import (
	"jbofd/internal/credit"
	"jbofd/internal/invariants"
)

// MaxTargets bounds the targets of a request.
const MaxTargets = 16

// Tenant is the number of a tenant. Tenant 0, of weight 1, is always there.
type Tenant uint16

// Choice says which target of a read is chosen among those that take it.
type Choice uint8

// Values of Choice.
const (
	// MostFree is the one with the greatest part of its credit left, or without credits the one with fewest requests
	// outstanding. LEED takes the one with most tokens left. With unequal credits that are not exhausted, that rule
	// sends all hosts to the same target.
	MostFree Choice = iota
	// InTurn is each in turn: what MostFree is compared with.
	InTurn
)

// Config of a Machine. The zero Config is that of LEED.
type Config struct {
	// NoTokens: requests do not wait for tokens, as if no SSD had sent a credit.
	NoTokens bool
	Choice   Choice
}

// quantum is what a turn adds to the deficit of a tenant of weight 1, in units.
const quantum = 8

// Machine schedules the requests of a host.
type Machine struct {
	cfg     Config
	weights []int // by tenant
	ssds    uint64
	turn    uint32 // rotates what is chosen among equals
	added   uint64 // counts requests
	// first and last are the ends of the list of requests to be sent. dirty are stages at which a request may go on.
	first, last *Request
	dirty       []*stage
	waiting     int
	waits       uint64
}

// New makes a Machine.
func New(cfg Config) *Machine { return &Machine{cfg: cfg, weights: []int{1}} }

// AddTenant adds a tenant of a weight, at least 1, and returns its number.
func (m *Machine) AddTenant(weight int) Tenant {
	m.weights = append(m.weights, max(weight, 1))
	return Tenant(len(m.weights) - 1)
}

// Tenants is how many tenants there are.
func (m *Machine) Tenants() int { return len(m.weights) }

// Waiting is how many requests wait now; Waits is how many have had to.
func (m *Machine) Waiting() (now int, ever uint64) { return m.waiting, m.waits }

// Link is the connection to a node: a bound on the commands that are outstanding there.
type Link struct {
	stage
	depth, used int
}

// NewLink makes a link that takes depth commands.
func (m *Machine) NewLink(depth int) *Link {
	l := &Link{depth: max(depth, 1)}
	l.link = l
	return l
}

// SetDepth changes the depth of a link.
func (m *Machine) SetDepth(l *Link, depth int) {
	l.depth = max(depth, 1)
	m.touch(&l.stage)
}

// SSD is where requests go. Several partitions may be on one SSD.
type SSD struct {
	stage
	to *Link
	// number is greater than those of the SSDs that were made before.
	number uint64
	win    credit.Window
	// admission is where writes wait until they are admitted. unsent are the units of writes that are admitted and not
	// sent, whether they hold them or not; reads are the units of win that reads hold.
	admission     stage
	unsent, reads int
}

// NewSSD makes an SSD that is reached over a link. It has no credit yet, and so does not limit anything.
func (m *Machine) NewSSD(l *Link) *SSD {
	m.ssds++
	s := &SSD{to: l, number: m.ssds}
	s.ssd = s
	s.admission.ssd, s.admission.admits = s, true
	return s
}

// Grant sets a credit that did not come with a completion.
func (m *Machine) Grant(now int64, s *SSD, units int) {
	s.win.Grant(now, units)
	m.touch(&s.stage)
	m.touch(&s.admission)
}

// Tokens returns how many units may be sent to an SSD now. unlimited: it has sent no credit.
func (s *SSD) Tokens(now int64) (units int, unlimited bool) {
	_, out := s.win.Outstanding()
	c := s.win.Credit(now)
	return c - out, c == 0
}

// Outstanding returns how many requests hold units of an SSD, and how many units.
func (s *SSD) Outstanding() (requests, units int) { return s.win.Outstanding() }

type state uint8

const (
	idle    state = iota
	waiting       // at SSDs, or at a link
	ready         // to be returned by Next
	sent
)

// Request is a request. The caller fills in the first fields before Add, and does not change them before Ended or
// Remove. A Request must not be copied after its first Add.
type Request struct {
	Tenant Tenant
	// Write: it takes tokens of all Targets, and goes to the first one. Otherwise it goes to one of them.
	Write bool
	// Units are the tokens that it takes, at least 1: see credit.Units.
	Units   int
	Targets [MaxTargets]*SSD
	N       int
	// Item is the caller's.
	Item any

	// sentTo is the target that it goes to. held are those of which it holds the tokens, a bit for each.
	sentTo int
	held   uint16
	state  state
	// age is less than those of the requests that were added later. admitted: the write counts as unsent at its
	// targets. moves counts its tries to be admitted, of which the first maxMoves may make it wait.
	age      uint64
	admitted bool
	moves    uint8
	next     *Request // of Machine.first
	nodes    [MaxTargets + 1]node
}

// soleNode is the number of a request's node in the queue of a link or of an admission: it is in no other queue then.
const soleNode = MaxTargets

// SentTo is the number of the target that a request goes to which Next has returned.
func (r *Request) SentTo() int { return r.sentTo }

// Idle reports whether a request has not been added, or has ended.
func (r *Request) Idle() bool { return r.state == idle }

// AtLink reports whether a request waits for a place of the link to its target SentTo, and for nothing else.
func (r *Request) AtLink() bool {
	in := r.nodes[soleNode].in
	return in != nil && in.link != nil
}

// Add adds a request, which Next returns when it is to be sent. It returns false if the request has to wait for that.
//
// hot: 0 allocs
func (m *Machine) Add(now int64, r *Request) (atOnce bool) {
	invariants.Check(r.state == idle && r.N >= 1 && r.N <= MaxTargets, "flowctl: a request is added twice")
	m.added++
	r.held, r.sentTo, r.Units, r.age, r.moves = 0, 0, max(r.Units, 1), m.added, 0
	switch {
	case !r.Write:
		m.addRead(now, r)
	case m.fitsAll(now, r):
		m.goOn(now, r)
	default:
		m.admit(now, r, nil)
	}
	if r.state == waiting {
		m.waits++
	}
	return r.state == ready
}

// addRead chooses a target that has the tokens and no queue, and takes a place of its link. If there is none, the
// request waits at all targets; a read may then still go on by what is left for reads (reserved).
func (m *Machine) addRead(now int64, r *Request) { // hot: 0 allocs
	best, bestFree, bestOut := -1, 0, 0
	m.turn++
	for k := range r.N {
		i := (k + int(m.turn%uint32(r.N))) % r.N
		s := r.Targets[i]
		if !s.empty() || !m.fits(now, s, r.Units) {
			continue
		}
		free, out := m.score(now, s)
		if best < 0 || m.cfg.Choice == MostFree && (free > bestFree || free == bestFree && out < bestOut) {
			best, bestFree, bestOut = i, free, out
		}
	}
	if best >= 0 {
		r.sentTo = best
		m.hold(r, best)
		m.enter(r)
		return
	}
	for i := range r.N {
		s := r.Targets[i]
		m.wait(&s.stage, r, i)
		if m.reserved(now, s, r.Units) {
			m.touch(&s.stage)
		}
	}
}

// wholeCredit is the part of its credit that an SSD has left with nothing outstanding.
const wholeCredit = 1 << 10

// score says how well an SSD can take a request: the greater the part of its credit that is free, then the fewer
// outstanding.
func (m *Machine) score(now int64, s *SSD) (free, outstanding int) { // hot: 0 allocs
	const unlimited = 1 << 30
	free = unlimited
	if t, none := s.Tokens(now); !none && !m.cfg.NoTokens {
		free = t * wholeCredit / max(s.win.Credit(now), 1)
	}
	if s.to.used >= s.to.depth {
		free -= unlimited // it would have to wait for the link
	}
	outstanding, _ = s.win.Outstanding()
	return free, outstanding
}

// fits reports whether an SSD has the tokens.
//
// Source: Algorithm 1, lines 5 and 9 to 13.
func (m *Machine) fits(now int64, s *SSD, units int) bool { // hot: 0 allocs
	return m.cfg.NoTokens || s.win.MaySend(now, units)
}

// readPart is the part of its credit that reads may have of an SSD whatever writes have: a quarter.
const readPart = 4

// reserved reports whether a read that does not fit the tokens may go to an SSD nevertheless, because writes have more
// than what is to be left for reads. One read may always be there.
func (m *Machine) reserved(now int64, s *SSD, units int) bool { // hot: 0 allocs
	_, out := s.win.Outstanding()
	c := s.win.Credit(now)
	forReads := c / readPart
	return out-s.reads >= c-forReads && (s.reads == 0 || s.reads+units <= forReads)
}

// hold takes the tokens of a target.
func (m *Machine) hold(r *Request, target int) { // hot: 0 allocs
	s := r.Targets[target]
	r.held |= 1 << target
	s.win.Sent(r.Units)
	if !r.Write {
		s.reads += r.Units
	}
}

// fitsAll reports whether a write can be sent at once.
func (m *Machine) fitsAll(now int64, r *Request) bool { // hot: 0 allocs
	for i := range r.N {
		if s := r.Targets[i]; !s.empty() || !m.fits(now, s, r.Units) {
			return false
		}
	}
	l := r.Targets[0].to
	return l.empty() && l.used < l.depth
}

const (
	// unsentPart is the part of the credit of an SSD that writes may have that are admitted and not sent: half.
	unsentPart = 2
	// maxMoves is how often a write waits to be admitted. It moves from one SSD to another one without tokens, so that
	// writes to either could hold it up for ever.
	maxMoves = 8
)

// admits reports whether one more write may be on the way at an SSD.
func (m *Machine) admits(now int64, s *SSD, units int) bool { // hot: 0 allocs
	c := s.win.Credit(now)
	return m.cfg.NoTokens || c == 0 || s.unsent == 0 || s.unsent+units <= c/unsentPart
}

// admit admits a write if all its targets do, or lets it wait at one that does not. It was the turn of the write at
// from; nil: it is new.
func (m *Machine) admit(now int64, r *Request, from *SSD) { // hot: 0 allocs
	if r.moves++; r.moves <= maxMoves {
		for i := range r.N {
			if s := r.Targets[i]; s != from && !s.admission.empty() || !m.admits(now, s, r.Units) {
				m.wait(&s.admission, r, soleNode)
				return
			}
		}
	}
	r.admitted = true
	for i := range r.N {
		if !r.again(i) {
			r.Targets[i].unsent += r.Units
		}
	}
	m.goOn(now, r)
}

// unadmit ends what admit has begun: the write is sent, or taken back.
func (m *Machine) unadmit(r *Request) { // hot: 0 allocs
	if !r.admitted {
		return
	}
	r.admitted = false
	for i := range r.N {
		if s := r.Targets[i]; !r.again(i) {
			s.unsent -= r.Units
			m.touch(&s.admission)
		}
	}
}

// again reports whether the SSD of a target is that of an earlier target, too.
func (r *Request) again(target int) bool { // hot: 0 allocs
	for i := range target {
		if r.Targets[i] == r.Targets[target] {
			return true
		}
	}
	return false
}

// goOn lets a write take tokens until it has all of them or must wait.
func (m *Machine) goOn(now int64, r *Request) { // hot: 0 allocs
	for {
		i := r.nextTarget()
		if i < 0 {
			m.enter(r)
			return
		}
		if s := r.Targets[i]; !s.empty() || !m.fits(now, s, r.Units) {
			m.wait(&s.stage, r, i)
			return
		}
		m.hold(r, i)
	}
}

// nextTarget is the target of a write whose tokens it has to take next, -1 if it has all: that of the least number. Two
// targets on one SSD count as one, because a write that waits for itself would wait for ever.
func (r *Request) nextTarget() int { // hot: 0 allocs
	best := -1
	for i := range r.N {
		if r.holds(r.Targets[i]) {
			continue
		}
		if best < 0 || r.Targets[i].number < r.Targets[best].number {
			best = i
		}
	}
	return best
}

func (r *Request) holds(s *SSD) bool { // hot: 0 allocs
	for i := range r.N {
		if r.held&(1<<i) != 0 && r.Targets[i] == s {
			return true
		}
	}
	return false
}

// enter takes a place of the link, or waits for one.
func (m *Machine) enter(r *Request) { // hot: 0 allocs
	l := r.Targets[r.sentTo].to
	if !l.empty() || l.used >= l.depth {
		m.wait(&l.stage, r, soleNode)
		return
	}
	m.send(l, r)
}

func (m *Machine) send(l *Link, r *Request) { // hot: 0 allocs
	l.used++
	m.unadmit(r)
	r.state, r.next = ready, nil
	if m.first == nil {
		m.first = r
	} else {
		m.last.next = r
	}
	m.last = r
}

// wait puts a request into the queue of a stage.
func (m *Machine) wait(s *stage, r *Request, n int) { // hot: 0 allocs
	if r.state != waiting {
		r.state = waiting
		m.waiting++
	}
	m.push(s, r, n)
}

// leave takes a request out of all queues.
func (m *Machine) leave(r *Request) { // hot: 0 allocs
	if r.state != waiting {
		return
	}
	for i := range r.nodes {
		if i < r.N || i == soleNode {
			m.remove(&r.nodes[i])
		}
	}
	r.state = idle
	m.waiting--
}

// Next returns a request that is to be sent now, nil if there is none. It is to be called until it returns nil after
// each of the other methods.
//
// hot: 0 allocs
func (m *Machine) Next(now int64) *Request {
	for m.first == nil && len(m.dirty) > 0 {
		s := m.dirty[len(m.dirty)-1]
		n := m.head(s)
		if n != nil && !m.room(now, s, n.r) {
			n = m.reservedRead(now, s)
		}
		if n == nil {
			m.dirty = m.dirty[:len(m.dirty)-1]
			s.dirty = false
			continue
		}
		m.serve(now, s, n)
	}
	r := m.first
	if r != nil {
		m.first, r.next, r.state = r.next, nil, sent
	}
	return r
}

// room reports whether a stage has room for a request.
func (m *Machine) room(now int64, s *stage, r *Request) bool { // hot: 0 allocs
	switch {
	case s.admits:
		return m.admits(now, s.ssd, r.Units)
	case s.ssd != nil:
		return m.fits(now, s.ssd, r.Units)
	}
	return s.link.used < s.link.depth
}

// serve lets the request of a node, for which there is room, go on.
func (m *Machine) serve(now int64, s *stage, n *node) { // hot: 0 allocs
	r := n.r
	s.deficit[r.Tenant] -= s.cost(r)
	target := int(n.number)
	m.leave(r)
	switch {
	case s.admits:
		m.admit(now, r, s.ssd)
	case target == soleNode:
		m.send(s.link, r)
	case r.Write:
		m.hold(r, target)
		m.goOn(now, r)
	default:
		r.sentTo = target
		m.hold(r, target)
		m.enter(r)
	}
}

// Ended ends a request that Next has returned. units is the credit of the SSD that it was sent to, 0 if none has come.
//
// hot: 0 allocs
func (m *Machine) Ended(now int64, r *Request, units int) {
	invariants.Check(r.state == sent, "flowctl: the end of a request that was not sent")
	m.release(now, r, units)
	l := r.Targets[r.sentTo].to
	l.used--
	m.touch(&l.stage)
	r.state = idle
}

// Remove takes back a request that Next has not returned.
//
// hot: 0 allocs
func (m *Machine) Remove(now int64, r *Request) {
	switch r.state {
	case waiting:
		m.leave(r)
		m.unadmit(r)
	case ready:
		m.unready(r)
		l := r.Targets[r.sentTo].to
		l.used--
		m.touch(&l.stage)
	default:
		return
	}
	m.release(now, r, 0)
	r.state = idle
}

// unready takes a request out of the list of those to be sent.
func (m *Machine) unready(r *Request) {
	var before *Request
	for o := m.first; o != r; o = o.next {
		before = o
	}
	if before == nil {
		m.first = r.next
	} else {
		before.next = r.next
	}
	if m.last == r {
		m.last = before
	}
	r.next = nil
}

// release returns the tokens of a request.
func (m *Machine) release(now int64, r *Request, units int) { // hot: 0 allocs
	for i := range r.N {
		if r.held&(1<<i) == 0 {
			continue
		}
		u := 0
		if i == r.sentTo {
			u = units
		}
		s := r.Targets[i]
		s.win.Completed(now, r.Units, u)
		if !r.Write {
			s.reads -= r.Units
		}
		m.touch(&s.stage)
		m.touch(&s.admission)
	}
	r.held = 0
}
