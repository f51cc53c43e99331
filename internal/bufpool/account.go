package bufpool

import (
	"errors"
	"fmt"

	"jbofd/internal/invariants"
)

// Account is one tenant's share of a Pool.
type Account struct {
	pool *Pool
	name string

	// Below here: guarded by pool.mu.
	src                   *source
	refs                  int
	inUse, peak           int64
	gets, failures, waits uint64
	first, last           *Waiter // FIFO of waiters
	// turn orders accounts that hold as much: the lower one has waited longer. order is that of first's block, -1 while
	// nobody waits; at is the account's place in src.waiting[order].
	turn  uint64
	order int
	at    int
}

// source is where one or more accounts come from, such as the hosts at one address. Anybody can invent hosts, and with
// each a new account, but hardly as many addresses: so it is sources that the reserve is divided among.
type source struct {
	name     string // "": it is of one account
	accounts int
	inUse    int64
	// waiting are its accounts with waiters, by the order that their first waiter wants; place is its index in
	// Pool.waiting[order], -1 while waiting[order] is empty.
	waiting [maxOrders]heap[*Account]
	place   [maxOrders]int
}

// Name is what the account was opened with.
func (a *Account) Name() string { return a.name }

// Account opens the account of that name, a new one or another reference to it, with a source of its own.
func (p *Pool) Account(name string) *Account { return p.AccountFrom(name, "") }

// AccountFrom is Account for one of several accounts of a source. An account that exists keeps its source.
func (p *Pool) AccountFrom(name, from string) *Account {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.accounts[name]
	if a == nil {
		a = &Account{pool: p, name: name, src: p.source(from), order: -1}
		a.src.accounts++
		p.accounts[name] = a
	}
	a.refs++
	return a
}

func (p *Pool) source(name string) *source {
	s := p.sources[name]
	if s == nil {
		s = &source{name: name}
		for o := range s.place {
			s.place[o] = -1
		}
		if name != "" {
			p.sources[name] = s
		}
	}
	return s
}

// Close gives up one reference. An account without references disappears from
// the statistics when its last buffer has come back.
func (a *Account) Close() {
	p := a.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	invariants.Check(a.refs > 0, "bufpool: account closed more often than opened")
	a.refs--
	p.dropIfUnused(a)
}

func (p *Pool) dropIfUnused(a *Account) {
	if a.refs != 0 || a.inUse != 0 || a.first != nil || p.accounts[a.name] != a {
		return
	}
	delete(p.accounts, a.name)
	if a.src.accounts--; a.src.accounts == 0 && a.src.name != "" {
		delete(p.sources, a.src.name)
	}
}

// charge counts n bytes more (or less) as the account's.
func (p *Pool) charge(a *Account, n int64) {
	poor := p.holdsLittle(a.src)
	p.inUse += n
	a.inUse += n
	a.src.inUse += n
	if poor != p.holdsLittle(a.src) {
		p.moveSource(a.src)
	}
	if a.order >= 0 {
		p.moveAccount(a)
	}
}

// holdsLittle reports whether a source holds so little that the reserve is for its accounts, too.
func (p *Pool) holdsLittle(s *source) bool { return s.inUse < int64(p.cfg.MaxBytes) }

// mayUseReserve reports whether the account may take the last whole blocks.
func (p *Pool) mayUseReserve(a *Account) bool { return a.inUse == 0 && p.holdsLittle(a.src) }

// AccountStats are one account's figures.
type AccountStats struct {
	Name                  string
	InUseBytes, PeakBytes int64
	// Gets succeeded; Failures were refused, of which Waits queued.
	Gets, Failures, Waits uint64
	Waiting               int
}

// Stats are a pool's figures at one moment.
type Stats struct {
	TotalBytes, InUseBytes, PeakBytes int64
	// TakenBytes is what has ever been made accessible: the bound on the memory used.
	TakenBytes int64
	// ArenaBytes is what arenas have, beside TotalBytes.
	ArenaBytes            int64
	Gets, Failures, Waits uint64
}

// Stats returns the pool's figures.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Stats{TotalBytes: p.totalBytes, InUseBytes: p.inUse, PeakBytes: p.peak, Gets: p.gets, Failures: p.failures,
		Waits: p.waits}
	for i := range p.taken {
		if p.taken[i].Load() {
			s.TakenBytes += int64(p.cfg.RegionBytes)
		}
	}
	p.arenas.stats(&s)
	return s
}

// AppendAccounts appends every account's figures to dst, in no order.
func (p *Pool) AppendAccounts(dst []AccountStats) []AccountStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.accounts {
		s := AccountStats{Name: a.name, InUseBytes: a.inUse, PeakBytes: a.peak, Gets: a.gets, Failures: a.failures,
			Waits: a.waits}
		for w := a.first; w != nil; w = w.next {
			s.Waiting++
		}
		dst = append(dst, s)
	}
	if n := p.extra.inUse; n > 0 {
		dst = append(dst, AccountStats{Name: p.extra.name, InUseBytes: n})
	}
	return p.arenas.appendAccounts(dst)
}

// Leaks returns an error that names the accounts with buffers outstanding or
// waiters queued, or nil.
func (p *Pool) Leaks() error {
	var err error
	for _, s := range p.AppendAccounts(nil) {
		if s.InUseBytes != 0 || s.Waiting != 0 {
			err = errors.Join(err, fmt.Errorf("bufpool: account %q holds %d bytes and has %d waiters", s.Name,
				s.InUseBytes, s.Waiting))
		}
	}
	return err
}
