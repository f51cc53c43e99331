package client

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"jbofd/internal/nvmeof/rdma/verbs"
)

func TestRDMAWithoutTheBuildTagIsAnError(t *testing.T) {
	if p, err := verbs.Open(); !errors.Is(err, verbs.ErrUnavailable) {
		if err == nil {
			err = p.Close()
		}
		t.Skipf("this machine has RDMA, or fails in another way: %v", err)
	}
	_, err := Connect(testContext(t), Options{Address: "rdma://127.0.0.1", SubNQN: "nqn.x"})
	if !errors.Is(err, ErrUnsupported) || !errors.Is(err, verbs.ErrUnavailable) {
		t.Errorf("%v, want ErrUnsupported", err)
	}
}

func TestAddressNamesTheTransport(t *testing.T) {
	for _, v := range []struct {
		o         Options
		want, err string
	}{
		{o: Options{Address: "10.0.0.1"}, want: "tcp://10.0.0.1:4420"},
		{o: Options{Address: "10.0.0.1:1"}, want: "tcp://10.0.0.1:1"},
		{o: Options{Address: "tcp://10.0.0.1:1/"}, want: "tcp://10.0.0.1:1"},
		{o: Options{Address: "rdma://10.0.0.1"}, want: "rdma://10.0.0.1:4420"},
		{o: Options{Address: "rdma://[fe80::1]:5"}, want: "rdma://[fe80::1]:5"},
		{o: Options{Address: "fe80::1", Transport: RDMA}, want: "rdma://[fe80::1]:4420"},
		{o: Options{Address: "rdma://10.0.0.1:1", Transport: RDMA}, want: "rdma://10.0.0.1:1"},
		{o: Options{Address: "10.0.0.1", discovery: true}, want: "tcp://10.0.0.1:8009"},
		{o: Options{Address: "rdma://10.0.0.1", discovery: true}, want: "rdma://10.0.0.1:4420"},
		{o: Options{Address: "rdma://10.0.0.1", Transport: TCP}, err: `Transport "tcp"`},
		{o: Options{Address: "fc://10.0.0.1"}, err: "rdma://host:port"},
		{o: Options{Address: "rdma://"}, err: "Address is empty"},
		{o: Options{Address: "10.0.0.1", Transport: "fc"}, err: `"tcp" or "rdma"`},
		{o: Options{Address: "rdma://10.0.0.1", DataDigest: true}, err: "DataDigest"},
		{o: Options{Address: "rdma://10.0.0.1", BounceBytes: 4096}, err: "BounceBytes"},
	} {
		v.o.SubNQN = "nqn.x"
		o, err := v.o.withDefaults()
		switch {
		case v.err != "":
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), v.err) {
				t.Errorf("%q, %q: %v, want %q", v.o.Address, v.o.Transport, err, v.err)
			}
		case err != nil || o.URL() != v.want:
			t.Errorf("%q, %q: %s, %v, want %s", v.o.Address, v.o.Transport, o.URL(), err, v.want)
		}
	}
	e := DiscoveryEntry{Transport: "rdma", Host: "fe80::1", Service: "4420"}
	if e.URL() != "rdma://[fe80::1]:4420" {
		t.Error(e.URL())
	}
}

func TestBadOptionsNameTheField(t *testing.T) {
	for want, o := range map[string]Options{
		"Address":    {SubNQN: "nqn.x"},
		"SubNQN":     {Address: "127.0.0.1"},
		"HostNQN":    {Address: "127.0.0.1", SubNQN: "nqn.x", HostNQN: strings.Repeat("x", 224)},
		"QueueDepth": {Address: "127.0.0.1", SubNQN: "nqn.x", QueueDepth: 1025},
		"MaxR2T":     {Address: "127.0.0.1", SubNQN: "nqn.x", MaxR2T: -1},
		"KATO":       {Address: "127.0.0.1", SubNQN: "nqn.x", KATO: time.Millisecond},
	} {
		if _, err := Connect(context.Background(), o); !errors.Is(err, ErrInvalid) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
