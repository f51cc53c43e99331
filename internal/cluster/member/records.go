package member

import (
	"context"
	"errors"
	"fmt"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/etcd"
)

// ErrExists: there is a cluster of that name.
var ErrExists = errors.New("there is a cluster of this name")

// Create makes a cluster. ranges is a power of two, hashSeed a random number.
//
// Errors: ErrExists, view.ErrInvalid, cluster.ErrUnreachable.
func Create(ctx context.Context, cfg etcd.Config, s cluster.Settings, hashSeed uint64, ranges int) error {
	compare, put, err := cluster.Init(s, hashSeed, ranges)
	if err != nil {
		return err
	}
	c, err := etcd.New(cfg)
	if err != nil {
		return err
	}
	defer c.Close()
	r, err := request(ctx, c, &cluster.Request{Kind: cluster.Txn, If: compare, Then: put})
	if err == nil && !r.Done {
		err = fmt.Errorf("%w: %s", ErrExists, cfg.Cluster)
	}
	return err
}

// Load returns the records of a cluster, for those who are no members yet.
//
// Errors: cluster.ErrUnreachable, cluster.ErrNoCluster, cluster.ErrForeign, cluster.ErrProtocol.
func Load(ctx context.Context, cfg etcd.Config) (*cluster.Records, error) {
	c, err := etcd.New(cfg)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return load(ctx, c)
}

// Change changes the settings of a cluster. change may be called several times, with settings that others have changed
// meanwhile; an error of it ends Change.
//
// Errors: that of change; those of Load. After cluster.ErrUnreachable the outcome is unknown.
func Change(ctx context.Context, cfg etcd.Config, change func(r *cluster.Records) error) error {
	c, err := etcd.New(cfg)
	if err != nil {
		return err
	}
	defer c.Close()
	for {
		r, err := load(ctx, c)
		if err != nil {
			return err
		}
		before := string(r.Settings.Encode())
		if err := change(r); err != nil {
			return err
		}
		if string(r.Settings.Encode()) == before {
			return nil
		}
		compare, put := r.Put()
		answer, err := request(ctx, c, &cluster.Request{Kind: cluster.Txn, If: compare, Then: put})
		if err != nil || answer.Done {
			return err
		}
	}
}

func load(ctx context.Context, c *etcd.Client) (*cluster.Records, error) {
	r, err := request(ctx, c, &cluster.Request{Kind: cluster.Read})
	if err != nil {
		return nil, err
	}
	return cluster.ReadRecords(r.Keys)
}

// request waits for the answer to a request.
func request(ctx context.Context, c *etcd.Client, r *cluster.Request) (*cluster.Response, error) {
	answer := make(chan *cluster.Response, 1)
	c.Do(r, func(r *cluster.Response) { answer <- r })
	select {
	case r := <-answer:
		if r.Err != nil {
			return nil, fmt.Errorf("%w: %w", cluster.ErrUnreachable, r.Err)
		}
		return r, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
