// Synthetic is the yardstick for an NVMe/TCP target: it moves the same bytes and
// does none of the work.
//
//	synthetic serve ADDRESS
//	synthetic drive ADDRESS DEPTH SECONDS    prints replies per second
package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"time"
)

// Sizes of a read command capsule and of its answer with 4 KiB of data.
const (
	requestBytes = 72
	replyBytes   = 24 + 4096
	maxDepth     = 256
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "synthetic:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "serve":
		return serve(args[1])
	case len(args) == 4 && args[0] == "drive":
		depth, err := strconv.Atoi(args[2])
		if err != nil || depth < 1 || depth > maxDepth {
			return fmt.Errorf("DEPTH %q: must be 1 to %d", args[2], maxDepth)
		}
		seconds, err := strconv.Atoi(args[3])
		if err != nil || seconds < 1 {
			return fmt.Errorf("SECONDS %q: must be at least 1", args[3])
		}
		return drive(args[1], depth, time.Duration(seconds)*time.Second)
	}
	return errors.New("usage: synthetic serve ADDRESS | synthetic drive ADDRESS DEPTH SECONDS")
}

func serve(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go answer(c.(*net.TCPConn))
	}
}

func answer(c *net.TCPConn) {
	defer c.Close()
	requests := make([]byte, requestBytes*maxDepth)
	header, data := make([]byte, 24), make([]byte, 4096)
	partial := 0
	var out net.Buffers
	for {
		n, err := c.Read(requests[partial:])
		if err != nil {
			return
		}
		n += partial
		out = out[:0]
		for range n / requestBytes {
			out = append(out, header, data)
		}
		partial = n % requestBytes
		send := out
		if _, err := send.WriteTo(c); err != nil {
			return
		}
	}
}

func drive(address string, depth int, d time.Duration) error {
	c, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	defer c.Close()
	requests := make([]byte, requestBytes*maxDepth)
	replies := make([]byte, 256<<10)
	if _, err := c.Write(requests[:requestBytes*depth]); err != nil {
		return err
	}
	count, partial := 0, 0
	start := time.Now()
	for time.Since(start) < d {
		n, err := c.Read(replies)
		if errors.Is(err, io.EOF) {
			return errors.New("the server closed the connection")
		}
		if err != nil {
			return err
		}
		n += partial
		k := n / replyBytes
		partial = n % replyBytes
		count += k
		if k > 0 {
			if _, err := c.Write(requests[:requestBytes*k]); err != nil {
				return err
			}
		}
	}
	fmt.Printf("%.0f\n", float64(count)/time.Since(start).Seconds())
	return nil
}
