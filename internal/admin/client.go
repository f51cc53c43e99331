package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"
)

// Sentinel errors.
var (
	// ErrNoDaemon: no daemon answers on the socket.
	ErrNoDaemon = errors.New("no jbofd answers")
	// ErrRefused: the daemon refused the request.
	ErrRefused = errors.New("jbofd refused")
	// ErrNoAnswer: the daemon has not answered before the context has ended. Its error is that of the context, too.
	ErrNoAnswer = errors.New("jbofd has not answered")
	// ErrNotNow: the daemon refused it because it is starting or stopping. It is ErrRefused, too.
	ErrNotNow = errors.New("the daemon is starting or stopping")
)

// maxAnswerBytes limits the length of an answer.
const maxAnswerBytes = 64 << 20

// Client sends requests to the daemon behind one socket. Its methods may be called from any goroutine.
//
// Errors of all methods: ErrNoDaemon; ErrRefused with the daemon's text; os.ErrPermission; ErrNoAnswer, with the error
// of the context.
type Client struct {
	socket string
	http   http.Client
}

// NewClient returns a client for the socket at the path. It does not connect yet.
func NewClient(socket string) *Client {
	c := &Client{socket: socket}
	c.http.Transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true,
	}
	return c
}

// Status describes the node.
func (c *Client) Status(ctx context.Context) (s Status, err error) {
	err = c.do(ctx, http.MethodGet, PathStatus, nil, &s)
	return s, err
}

// SSDs lists the drives.
func (c *Client) SSDs(ctx context.Context) (l List[SSD], err error) {
	err = c.do(ctx, http.MethodGet, PathSSDs, nil, &l)
	return l, err
}

// Subsystems lists the subsystems with their namespaces.
func (c *Client) Subsystems(ctx context.Context) (l List[Subsystem], err error) {
	err = c.do(ctx, http.MethodGet, PathSubsystems, nil, &l)
	return l, err
}

// Connections lists the connections of hosts.
func (c *Client) Connections(ctx context.Context) (l List[Connection], err error) {
	err = c.do(ctx, http.MethodGet, PathConnections, nil, &l)
	return l, err
}

// Tenants lists the tenants at each drive.
func (c *Client) Tenants(ctx context.Context) (l List[Tenant], err error) {
	err = c.do(ctx, http.MethodGet, PathTenants, nil, &l)
	return l, err
}

// Reload makes the daemon reload its configuration, and returns the changes.
func (c *Client) Reload(ctx context.Context) (r Reload, err error) {
	err = c.do(ctx, http.MethodPost, PathReload, nil, &r)
	return r, err
}

// DryReload returns what Reload would change, or the error that it would return. It changes nothing.
func (c *Client) DryReload(ctx context.Context) (r Reload, err error) {
	err = c.do(ctx, http.MethodPost, PathReload+"?"+ParamDryRun+"=true", nil, &r)
	return r, err
}

// DeleteNamespace frees the extent of a namespace that is no longer configured.
func (c *Client) DeleteNamespace(ctx context.Context, uuid string) (a Answer, err error) {
	err = c.do(ctx, http.MethodPost, PathNamespaceDelete, DeleteNamespace{UUID: uuid}, &a)
	return a, err
}

// Swap lists the swap areas.
func (c *Client) Swap(ctx context.Context) (l List[SwapArea], err error) {
	err = c.do(ctx, http.MethodGet, PathSwap, nil, &l)
	return l, err
}

// DiscardSwap gives up a swap area with all records in it.
func (c *Client) DiscardSwap(ctx context.Context, uuid string) (a Answer, err error) {
	err = c.do(ctx, http.MethodPost, PathSwapDiscard, DiscardSwap{UUID: uuid}, &a)
	return a, err
}

// KVAudits lists the audits of the key-value namespaces that are served.
func (c *Client) KVAudits(ctx context.Context) (l List[KVAudit], err error) {
	err = c.do(ctx, http.MethodGet, PathKVAudits, nil, &l)
	return l, err
}

// AuditKV looks at every segment of a key-value namespace and, with repair, gives up what is lost.
func (c *Client) AuditKV(ctx context.Context, uuid string, repair bool) (a KVAudit, err error) {
	err = c.do(ctx, http.MethodPost, PathKVAudit, AuditKV{UUID: uuid, Repair: repair}, &a)
	return a, err
}

// KVScrubs lists the scrubs of the key-value namespaces that are served.
func (c *Client) KVScrubs(ctx context.Context) (l List[KVScrub], err error) {
	err = c.do(ctx, http.MethodGet, PathKVScrubs, nil, &l)
	return l, err
}

// ScrubKV changes the rate of the scrub of a key-value namespace.
func (c *Client) ScrubKV(ctx context.Context, uuid string, bytesPerSec int64) (s KVScrub, err error) {
	err = c.do(ctx, http.MethodPost, PathKVScrub, ScrubKV{UUID: uuid, BytesPerSec: bytesPerSec}, &s)
	return s, err
}

// OpenKV opens a key-value namespace although it has lost writes; accept is the token of the loss.
func (c *Client) OpenKV(ctx context.Context, uuid, accept string) (a Answer, err error) {
	err = c.do(ctx, http.MethodPost, PathKVOpen, OpenKV{UUID: uuid, AcceptLoss: accept}, &a)
	return a, err
}

// send sends one request. The caller closes the body of the answer.
func (c *Client) send(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://jbofd"+path, body)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	resp, err := c.http.Do(req)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, c.noAnswer(ctx, began)
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%w at %s: is it running, and is this its admin.socket?", ErrNoDaemon, c.socket)
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("admin socket %s: %w: only root and the user that jbofd runs as may use it", c.socket,
			os.ErrPermission)
	case err != nil:
		return nil, fmt.Errorf("admin socket %s: %w", c.socket, err)
	}
	return resp, nil
}

// noAnswer is the error of a request whose context has ended.
func (c *Client) noAnswer(ctx context.Context, began time.Time) error {
	e := &noAnswerError{"before it was interrupted", ctx.Err()}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		e.when = "within " + time.Since(began).Round(100*time.Millisecond).String()
	}
	return fmt.Errorf("admin socket %s: %w", c.socket, e)
}

// noAnswerError is ErrNoAnswer and the error of a context, in words for who has given a time.
type noAnswerError struct {
	when string
	err  error
}

func (e *noAnswerError) Error() string { return ErrNoAnswer.Error() + " " + e.when }

func (e *noAnswerError) Unwrap() []error { return []error{ErrNoAnswer, e.err} }

// do sends one request. The argument send may be nil.
func (c *Client) do(ctx context.Context, method, path string, send, into any) error {
	var body io.Reader
	if send != nil {
		b, err := json.Marshal(send)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	began := time.Now()
	resp, err := c.send(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil && ctx.Err() != nil {
		return c.noAnswer(ctx, began)
	}
	if err != nil {
		return fmt.Errorf("admin socket %s: %w", c.socket, err)
	}
	if resp.StatusCode >= http.StatusBadRequest {
		return refused(resp, data)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("admin socket %s: %s answered no JSON that this program knows: %w", c.socket, path, err)
	}
	return nil
}
