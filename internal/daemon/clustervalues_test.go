package daemon

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/nvme"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

// TestTheLongestValueIsThatOfTheCluster: the node that makes the cluster has less limits.mdts than another one, which
// refuses longer values then, as ChainHead too, before anything is done at any node. One that has still less does not
// take part until it has more.
func TestTheLongestValueIsThatOfTheCluster(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	hosts := clusterHosts(3)
	var worlds []*world
	for i, mdts := range []string{"1MiB", "256KiB", "128KiB"} {
		worlds = append(worlds, newWorld(t))
		worlds[i].configureNode(hosts, i, "demo", etcd.URL, onePartition, "limits: {mdts: "+mdts+"}")
	}
	var nodes []*node
	for _, w := range worlds {
		nodes = append(nodes, w.mustStart())
	}
	eventually(t, "the cluster is made", func() error {
		_, err := nodes[1].admin.InitCluster(t.Context(), admin.InitCluster{Replicas: 2, Ranges: 16})
		return err
	})
	agree(t, "two nodes have all", nodes[:2], func(a admin.Cluster) error {
		if up(a) != 2 || a.Ranges.Full != a.Ranges.Total || !a.Ready {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
	ns := keysOf(nodes[:2])
	const longest = 256<<10 - nvme.KVEntryOverhead
	for i := range 16 { // some of them have the one as ChainHead, some the other
		key := fmt.Sprint("key", i)
		ns.stored(t, key, "short")
		for _, n := range ns {
			for _, size := range []int{longest + 1, 512 << 10, 1<<20 - nvme.KVEntryOverhead} {
				begin := time.Now()
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				err := n.Put(ctx, []byte(key), bytes.Repeat([]byte{1}, size))
				if cancel(); err == nil {
					t.Fatalf("a value of %d bytes is taken", size)
				} else if took := time.Since(begin); took > 5*time.Second {
					t.Errorf("a value of %d bytes is refused after %v: %v", size, took, err)
				}
			}
		}
		ns.read(t, key, "short", 2)
	}
	value := bytes.Repeat([]byte{2}, longest)
	for i := range 16 {
		ns.stored(t, fmt.Sprint("long", i), string(value))
	}
	if err := nodes[1].stop(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, longest)
	for i := range 16 {
		eventually(t, "the other node has the longest value", func() error {
			size, err := ns[0].Get(t.Context(), fmt.Append(nil, "long", i), buf)
			if err == nil && !bytes.Equal(buf[:size], value) {
				t.Errorf("value %d: %d bytes", i, size)
			}
			return err
		})
	}

	eventually(t, "the third node says why it does not take part", func() error {
		if r := nodes[2].reason("cluster"); !strings.Contains(r, "limits.mdts is 128KiB") ||
			!strings.Contains(r, fmt.Sprint("values of up to ", longest)) {
			return fmt.Errorf("%q", r)
		}
		return nil
	})
	if got := nodes[0].cluster(); len(got.Partitions) != 2 {
		t.Errorf("the map has %+v", got.Partitions)
	}
	if err := nodes[2].stop(); err != nil {
		t.Fatal(err)
	}
	worlds[2].configureNode(hosts, 2, "demo", etcd.URL, onePartition, "limits: {mdts: 512KiB}")
	nodes[2] = worlds[2].mustStart()
	agree(t, "the third node takes part", []*node{nodes[0], nodes[2]}, func(a admin.Cluster) error {
		if up(a) != 2 || len(a.Partitions) != 3 {
			return fmt.Errorf("%+v", a)
		}
		return nil
	})
}
