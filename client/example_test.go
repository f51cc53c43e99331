package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"jbofd/client"
)

// A namespace as a disk.
func ExampleConnect() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Options{Address: "192.0.2.1:4420", SubNQN: "nqn.2026-11.example.jbofd:blocks"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	disk, err := c.Namespace(ctx, 1)
	if err != nil {
		log.Fatal(err)
	}
	block := make([]byte, disk.BlockSize())
	if _, err := disk.WriteAt(ctx, block, 0, client.FUA); err != nil {
		log.Fatal(err)
	}
	err = disk.CompareAndWrite(ctx, block, append([]byte("mine"), block[4:]...), 0)
	if errors.Is(err, client.ErrCompareFailed) {
		fmt.Println("somebody else was first")
	}
}

// Many I/Os in flight from one goroutine.
func ExampleController_OpenQPair() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Options{Address: "192.0.2.1:4420", SubNQN: "nqn.2026-11.example.jbofd:blocks",
		QPairs: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	q, err := c.OpenQPair(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer q.Close()
	cmds := make([]client.Command, 32)
	for i := range cmds {
		cmds[i].Tag = uint64(i)
		cmds[i].Data = make([]byte, 4096)
		client.SetRW(&cmds[i], client.OpRead, 1, uint64(i), 1)
	}
	if _, err := q.Submit(cmds); err != nil {
		log.Fatal(err)
	}
	comps := make([]client.Completion, len(cmds))
	for done := 0; done < len(cmds); {
		n, err := q.Poll(comps, -1)
		if err != nil {
			log.Fatal(err)
		}
		for _, comp := range comps[:n] {
			fmt.Println(comp.Tag, comp.Status)
		}
		done += n
	}
}

// Over RDMA, with memory that the target reads and writes in place.
func ExampleController_AllocBuffer() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Options{Address: "rdma://192.0.2.1:4420",
		SubNQN: "nqn.2026-11.example.jbofd:blocks", QPairs: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	buf, free, err := c.AllocBuffer(1 << 20)
	if err != nil {
		log.Fatal(err)
	}
	defer free()
	q, err := c.OpenQPair(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer q.Close()
	cmd := client.Command{Data: buf}
	client.SetRW(&cmd, client.OpRead, 1, 0, 256)
	if _, err := q.Submit([]client.Command{cmd}); err != nil {
		log.Fatal(err)
	}
	var comps [1]client.Completion
	if _, err := q.Poll(comps[:], -1); err != nil {
		log.Fatal(err)
	}
	fmt.Println(comps[0].Status, comps[0].Received)
}

// Connect to what a discovery service lists, by the transport that it names.
func ExampleDiscover() {
	ctx := context.Background()
	found, err := client.Discover(ctx, client.Options{Address: "rdma://192.0.2.1"})
	if err != nil {
		log.Fatal(err)
	}
	for _, e := range found.Entries {
		c, err := client.Connect(ctx, client.Options{Address: e.URL(), SubNQN: e.SubNQN})
		if err != nil {
			log.Print(err)
			continue
		}
		fmt.Println(e.URL(), e.SubNQN)
		if err := c.Close(); err != nil {
			log.Print(err)
		}
	}
}

// A program that has more commands than it may send, and chooses one when it may.
func ExampleNamespace_WaitCredit() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Options{Address: "192.0.2.1:4420", SubNQN: "nqn.2026-11.example.jbofd:blocks"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	disk, err := c.Namespace(ctx, 1)
	if err != nil {
		log.Fatal(err)
	}
	urgent, background := make(chan int64, 16), make(chan int64, 16)
	for range 1000 {
		if err := disk.WaitCredit(ctx, 4096); err != nil {
			log.Fatal(err)
		}
		var off int64
		select {
		case off = <-urgent: // what came while there was no room goes first
		default:
			off = <-background
		}
		go func() {
			if _, err := disk.ReadAt(ctx, make([]byte, 4096), off); err != nil {
				log.Print(err)
			}
		}()
	}
	now := disk.Credit()
	fmt.Printf("drive %d: %d of %d units outstanding, %d commands wait\n", now.SSD, now.Outstanding, now.Units,
		now.Waiting)
}
