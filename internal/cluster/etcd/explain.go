package etcd

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ErrNoLeader: servers of etcd run, but cannot agree on a leader, because too few of them reach each other.
var ErrNoLeader = errors.New("it has no leader, for which most of its servers must run and reach each other")

// errMostAway: the same is likely, but the servers that can be reached do not say so.
var errMostAway = errors.New("most of its servers do not")

// silence is a deadline that was exceeded.
type silence struct {
	after time.Duration
	err   error
}

func (s *silence) Error() string { return fmt.Sprintf("no answer within %v", s.after) }

func (s *silence) Unwrap() error { return s.err }

// unsaid is an error whose text is in that of the error that wraps it.
type unsaid struct{ error }

func (*unsaid) Error() string { return "" }

func (u *unsaid) Unwrap() error { return u.error }

// What the servers say for themselves.
const (
	saysNothing  = "no answer"
	saysNoLeader = "no leader"
)

// explain adds to a deadline that was exceeded what each of the servers says. The library tries one after the other
// until the deadline, and does not tell.
func (c *Client) explain(err error) error {
	if !errors.Is(err, context.DeadlineExceeded) || c.ctx.Err() != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(c.ctx, c.cfg.Timeout/2)
	defer cancel()
	says := make([]string, len(c.cfg.Endpoints))
	var probes sync.WaitGroup
	for i, e := range c.cfg.Endpoints {
		probes.Go(func() { says[i] = c.stateOf(ctx, e) })
	}
	probes.Wait()
	var list []string
	away, leaderless := 0, false
	for i, what := range says {
		if what == "" {
			continue
		}
		leaderless = leaderless || what == saysNoLeader
		if what != saysNoLeader {
			away++
		}
		if slices.Index(says, what) < i {
			continue // told with the first one
		}
		var same []string
		for k, e := range c.cfg.Endpoints {
			if says[k] == what {
				same = append(same, e)
			}
		}
		list = append(list, strings.Join(same, ", ")+": "+what)
	}
	err = &silence{c.cfg.Timeout, err}
	switch {
	case leaderless:
		err = fmt.Errorf("%w; %w", ErrNoLeader, err)
	case away > 1 && away > len(says)/2:
		err = fmt.Errorf("%w, within %v%w", errMostAway, c.cfg.Timeout, &unsaid{err})
	}
	if len(list) == 0 {
		return err
	}
	return fmt.Errorf("%w (%s)", err, strings.Join(list, "; "))
}

// stateOf returns what is wrong with a server, empty if it answers and has a leader.
func (c *Client) stateOf(ctx context.Context, endpoint string) string {
	conn, err := c.dial([]string{endpoint}, "", "")
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	// It answers what it has itself, unless it has no leader.
	_, err = etcdserverpb.NewKVClient(conn.ActiveConnection()).Range(clientv3.WithRequireLeader(ctx),
		&etcdserverpb.RangeRequest{Key: []byte(c.prefix), CountOnly: true, Serializable: true},
		grpc.WaitForReady(false))
	switch said := status.Convert(err); {
	case err == nil:
		return ""
	case errors.Is(rpctypes.Error(err), rpctypes.ErrNoLeader):
		return saysNoLeader
	case said.Code() == codes.DeadlineExceeded:
		return saysNothing
	case said.Code() == codes.Unavailable:
		return plain(said.Message())
	}
	return "" // an authentication error, for instance: the server is running
}

// plain takes from an error of a connection what only says where it was made.
func plain(text string) string {
	text = strings.TrimSuffix(strings.TrimPrefix(text, `connection error: desc = "`), `"`)
	for _, before := range []string{"transport: Error while dialing: ", "connect: "} {
		if _, after, found := strings.Cut(text, before); found {
			text = after
		}
	}
	return text
}
