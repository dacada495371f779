"""Where bytes lie: files, folders and objects on a disk, in a bucket, on the hub or a web server."""
