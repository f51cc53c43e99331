package kv_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"jbofd/client"
	"jbofd/client/kv"
)

// A namespace as a map.
func ExampleOpen() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Options{Address: "192.0.2.1:4420", SubNQN: "nqn.2026-11.example.jbofd:store"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	users, err := kv.Open(ctx, c, 1, kv.Options{})
	if err != nil {
		log.Fatal(err)
	}
	if err := users.Put(ctx, []byte("ada"), []byte("countess")); err != nil {
		log.Fatal(err)
	}
	switch err := users.PutIfAbsent(ctx, []byte("ada"), []byte("somebody else")); {
	case errors.Is(err, kv.ErrKeyExists):
		fmt.Println("the name is taken")
	case err != nil:
		log.Fatal(err)
	}
	value, err := users.Value(ctx, []byte("ada"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", value)
	for key, err := range users.Keys(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s\n", key)
	}
}

// Keys of any length. All users of the namespace must open it with LongKeys.
func ExampleOptions() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Options{Address: "192.0.2.1:4420", SubNQN: "nqn.2026-11.example.jbofd:store"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	pages, err := kv.Open(ctx, c, 2, kv.Options{LongKeys: true})
	if err != nil {
		log.Fatal(err)
	}
	key := []byte("https://www.example.org/a/page/with/a/long/name.html")
	if err := pages.Put(ctx, key, []byte("<html>")); err != nil {
		log.Fatal(err)
	}
	head := make([]byte, 64)
	size, err := pages.Get(ctx, key, head)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s... of %d bytes\n", head[:min(size, len(head))], size)
}

// Many operations outstanding from one goroutine.
func ExampleNamespace_OpenQueue() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Options{Address: "192.0.2.1:4420", SubNQN: "nqn.2026-11.example.jbofd:store",
		QPairs: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	store, err := kv.Open(ctx, c, 1, kv.Options{})
	if err != nil {
		log.Fatal(err)
	}
	q, err := store.OpenQueue(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer q.Close()
	ops := make([]kv.Op, 100)
	for i := range ops {
		ops[i] = kv.Op{Kind: kv.Put, Key: fmt.Appendf(nil, "key %d", i), Value: make([]byte, 256), Tag: uint64(i)}
	}
	results := make([]kv.Result, q.Depth())
	for sent := 0; sent < len(ops) || q.Outstanding() > 0; {
		n, err := q.Submit(ops[sent:])
		if err != nil {
			log.Fatal(err)
		}
		sent += n
		n, err = q.Poll(results, -1)
		if err != nil {
			log.Fatal(err)
		}
		for _, r := range results[:n] {
			if r.Err != nil {
				log.Printf("key %d: %v", r.Tag, r.Err)
			}
		}
	}
}
