//go:build rdma && cgo

package verbs

import (
	"bytes"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestAddressesAndParamsSurviveC(t *testing.T) {
	for _, a := range []string{"10.77.0.1:4420", "0.0.0.0:0", "[fd77::1]:4420", "[::]:65535", "[fe80::1%1]:1"} {
		want := netip.MustParseAddrPort(a)
		c := toC(want)
		if got := fromC(&c); got != want {
			t.Errorf("%v became %v", want, got)
		}
	}
	c := toC(netip.MustParseAddrPort("[::ffff:10.0.0.1]:1"))
	if got := fromC(&c); got != netip.MustParseAddrPort("10.0.0.1:1") {
		t.Errorf("a mapped address became %v", got)
	}
	// The CM reports the depths from the view of each side.
	p := Params{PrivateData: bytes.Repeat([]byte{7}, MaxAcceptData), ResponderResources: 2, InitiatorDepth: 3,
		RetryCount: 4, RNRRetryCount: 5}
	cp := paramToC(p)
	q := peerFromC(&cp)
	if !bytes.Equal(q.PrivateData, p.PrivateData) || q.ResponderResources != 3 || q.InitiatorDepth != 2 ||
		q.RetryCount != 4 || q.RNRRetryCount != 5 {
		t.Errorf("%+v became %+v", p, q)
	}
}

func TestRefusedRegistrationNamesTheMemlockLimit(t *testing.T) {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil {
		t.Fatal(err)
	}
	err := registerError(4096, unix.ENOMEM)
	if !errors.Is(err, ErrResources) || !errors.Is(err, unix.ENOMEM) {
		t.Error(err)
	}
	if limited := lim.Cur != unix.RLIM_INFINITY; strings.Contains(err.Error(), "memlock limit") != limited {
		t.Errorf("%v, with a limit: %v", err, limited)
	}
	if err := registerError(4096, unix.EIO); !errors.Is(err, ErrDeviceRemoved) {
		t.Error(err)
	}
}

func TestAnswersMeanErrors(t *testing.T) {
	for _, test := range []struct {
		ev   cmEvent
		want error
	}{
		{cmEvent{kind: cmAddrError, status: -int32(unix.ENODEV)}, ErrNoDevice},
		{cmEvent{kind: cmAddrError, status: -int32(unix.ETIMEDOUT)}, ErrUnreachable},
		{cmEvent{kind: cmRouteError, status: -int32(unix.EHOSTUNREACH)}, ErrUnreachable},
		{cmEvent{kind: cmUnreachable, status: -int32(unix.ETIMEDOUT)}, ErrUnreachable},
		{cmEvent{kind: cmConnectError}, ErrUnreachable},
		{cmEvent{kind: cmDisconnected}, ErrUnreachable},
		{cmEvent{kind: cmRejected, status: rejectNoListener}, ErrUnreachable},
		{cmEvent{kind: cmDeviceRemoval}, ErrDeviceRemoved},
	} {
		if err := test.ev.err(); !errors.Is(err, test.want) {
			t.Errorf("%+v: %v, want %v", test.ev, err, test.want)
		}
	}
	ev := cmEvent{kind: cmRejected, status: 28, peer: Params{PrivateData: []byte{1}}}
	var r *RejectedError
	if err := ev.err(); !errors.As(err, &r) || r.Reason != 28 || len(r.PrivateData) != 1 {
		t.Error(err)
	}
}
